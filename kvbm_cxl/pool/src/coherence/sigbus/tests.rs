// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn a_handler_that_could_not_be_installed_is_tried_again() {
    let _turn = INSTALLED.lock().unwrap();
    let before = PREVIOUS.load(Ordering::SeqCst);
    let mut is_installed = false;
    assert!(install_with(&mut is_installed, |_| -1).is_err());
    assert!(!is_installed && PREVIOUS.load(Ordering::SeqCst) == before);
    let mut tries = 0;
    for _ in 0..2 {
        install_with(&mut is_installed, |action| {
            tries += 1;
            assert_ne!(action.sa_sigaction, libc::SIG_DFL);
            0
        })
        .unwrap();
    }
    assert!(is_installed && tries == 1);
    PREVIOUS.store(before, Ordering::SeqCst);
}
