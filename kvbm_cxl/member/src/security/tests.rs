// SPDX-License-Identifier: Apache-2.0

use super::*;

fn refused(security: &Security, endpoint: &str) -> String {
    security.apply(&[endpoint.into()], ConnectOptions::new()).unwrap_err().to_string()
}

#[test]
fn what_does_not_go_together_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ca.pem");
    let security = Security { cacert: Some(path.clone()), ..Security::default() };
    assert!(refused(&security, "http://a:1").contains("http://a:1"));
    assert!(refused(&Security::default(), "https://a:1").contains("--cacert"));
    let missing = refused(&security, "https://a:1");
    assert!(missing.contains("ca.pem"), "{missing}");
    std::fs::write(&path, "-----BEGIN PRIVATE KEY-----\n").unwrap();
    let wrong = refused(&security, "https://a:1");
    assert!(wrong.contains("ca.pem") && wrong.contains("CERTIFICATE"), "{wrong}");
    assert!(Security::default().apply(&["http://a:1".into()], ConnectOptions::new()).is_ok());
}

#[test]
fn the_password_is_the_first_line_of_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("password");
    std::fs::write(&path, "pass word \n").unwrap();
    let security = Security { password_file: Some(path), password: None, ..Security::default() };
    assert_eq!(security.password().unwrap(), "pass word ");
}
