// SPDX-License-Identifier: Apache-2.0
//! Tests of `server`.
use super::*;

#[test]
fn an_answer_that_takes_long_arrives() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    let deadline = Instant::now() + Duration::from_secs(2);
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        client.read_to_string(&mut text).map(|_| text)
    });
    let slow = |_: &str| {
        while Instant::now() <= deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        Answer::refusal("200 OK", "at last")
    };
    converse(&mut stream, deadline, &slow).unwrap();
    assert!(reader.join().unwrap().unwrap().ends_with("at last\n"));
}

#[test]
fn first_lines_are_read_or_refused() {
    let read = |text: &'static str| first_line(text.as_bytes());
    assert_eq!(read("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"), Some(("GET", "/metrics")));
    assert_eq!(read("HEAD /metrics?a=b HTTP/1.0\r\n\r\n"), Some(("HEAD", "/metrics")));
    for text in ["", "GET", "GET /metrics", "GET /metrics HTTP/2.0", "GET  /metrics HTTP/1.1", "GET http://a/ HTTP/1.1", "GET / HTTP/1.1 x"]
    {
        assert_eq!(read(text), None, "{text:?}");
    }
    assert_eq!(first_line(b"\xff / HTTP/1.1\r\n\r\n"), None);
}
