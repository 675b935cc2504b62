// SPDX-License-Identifier: Apache-2.0

use super::*;
use std::collections::BTreeSet;

fn tasks(count: usize) -> Vec<Task> {
    (0..count).map(|list| Task { list, pieces: Vec::new(), device: list % 3 }).collect()
}

#[test]
fn every_task_is_done_once_by_any_thread() {
    let queue = JobQueue::with_workers(3, None);
    for round in 0..200 {
        let count = 1 + round % 17;
        let work = |task: &Task| vec![(task.list, Ok(Some(task.list as u64 * 7)))];
        let job = Arc::new(Job::new(tasks(count), &work));
        queue.ask(&job, 3);
        job.help(0);
        let mut lists: Vec<(usize, u64)> = job.wait().into_iter().map(|(list, sum)| (list, sum.unwrap().unwrap())).collect();
        lists.sort_unstable();
        assert_eq!(lists, (0..count).map(|list| (list, list as u64 * 7)).collect::<Vec<_>>());
    }
    queue.close();
}

#[test]
fn workers_take_part_and_one_that_panics_fails_its_list_alone() {
    let queue = JobQueue::with_workers(2, None);
    let seen: Mutex<BTreeSet<String>> = Mutex::default();
    let work = |task: &Task| {
        // The caller's first task takes until a worker has come.
        for _ in 0..10_000 {
            held(&seen).insert(std::thread::current().name().unwrap_or_default().to_owned());
            if held(&seen).len() > 1 {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(task.list != 4, "planned");
        vec![(task.list, Ok(None))]
    };
    let job = Arc::new(Job::new(tasks(9), &work));
    queue.ask(&job, 2);
    job.help(0);
    let outcomes = job.wait();
    queue.close();
    assert!(held(&seen).iter().any(|name| name.starts_with("cxl-copy-")), "no worker took part");
    let failed: Vec<usize> = outcomes.iter().filter(|(_, outcome)| outcome.is_err()).map(|(list, _)| *list).collect();
    assert_eq!((outcomes.len(), failed), (9, vec![4]));
}
