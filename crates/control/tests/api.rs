//! Goal: programs can rely on the API: statuses, JSON errors, changes that are whole.
//! Method: plain HTTP over the socket, also by clients that misbehave.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use daemon::Daemon;
use serde_json::{Value, json};

fn send(daemon: &Daemon, method: &str, path: &str, body: &str) -> UnixStream {
    let mut stream = UnixStream::connect(daemon.path("api.sock")).unwrap();
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    stream
}

fn request(daemon: &Daemon, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let mut text = String::new();
    send(daemon, method, path, &body).read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    // Small answers are not chunked.
    (status, serde_json::from_str(body).unwrap_or(Value::Null))
}

#[test]
fn refusals_are_json_with_the_right_status() {
    let daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 16M");
    let volume = json!({ "name": "w", "array": "a", "bytes": 1_u64 << 50 });
    for (method, path, body, status) in [
        ("GET", "/v1/drives/x", Value::Null, 404),
        ("GET", "/v1/drives/%ff", Value::Null, 400),
        ("POST", "/v1/arrays/%ff/start", Value::Null, 400),
        ("GET", "/v1/nonsense", Value::Null, 404),
        ("PUT", "/v1/drives", Value::Null, 405),
        ("DELETE", "/v1/drives/d0", Value::Null, 409),
        ("DELETE", "/v1/drives/d0?force=maybe", Value::Null, 400),
        ("POST", "/v1/drives", json!({}), 400),
        ("POST", "/v1/drives", json!({ "source": { "path": "relative" } }), 400),
        ("POST", "/v1/drives", json!({ "source": { "ram": 1 << 26 }, "surprise": 1 }), 400),
        ("POST", "/v1/arrays", json!({ "name": "b", "level": "3", "drives": ["d0"] }), 400),
        ("POST", "/v1/arrays", json!({ "name": "b", "level": 1, "drives": ["d0"] }), 400),
        ("POST", "/v1/arrays/a/scrub", json!({ "repair": "yes" }), 400),
        ("POST", "/v1/volumes", volume, 507),
        ("POST", "/v1/volumes/v/resize", json!({ "bytes": 512 }), 409),
        ("POST", "/v1/volumes/v/resize", json!({ "bytes": -1 }), 400),
        ("POST", "/v1/exports", json!({ "name": "e", "volume": "v", "cores": [] }), 400),
    ] {
        let (got, answer) = request(&daemon, method, path, &body);
        assert_eq!(got, status, "{method} {path} {body}: {answer}");
        let error = answer["error"].as_str().unwrap_or_default();
        assert!(!error.is_empty(), "{method} {path}: {answer}");
    }
    let (status, _) = request(&daemon, "GET", "/v1/volumes/a%2Fv", &Value::Null);
    assert_eq!(status, 200);
}

#[test]
fn the_document_describes_what_is_served() {
    let daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v");
    let document = daemon.json("openapi");
    let mut shown = 0;
    for (path, operations) in document["paths"].as_object().unwrap() {
        if operations["get"].is_null() {
            continue;
        }
        let name = ["drives", "arrays", "volumes", "exports"].iter().zip(["d0", "a", "v", "e"]);
        let name = name.filter(|(noun, _)| path.contains(**noun)).map(|(_, name)| name).next();
        let path = path.replace("{name}", name.unwrap_or_default());
        let (status, answer) = request(&daemon, "GET", &path, &Value::Null);
        assert_eq!(status, 200, "{path}: {answer}");
        shown += 1;
    }
    assert_eq!(
        shown, 12,
        "lists and single things of four nouns, spares, status, metrics, upgrade"
    );
}

#[test]
fn only_the_daemons_user_may_ask() {
    let daemon = Daemon::start();
    let mode = std::fs::metadata(daemon.path("api.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mode = std::fs::metadata(daemon.path("state")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
}

#[test]
fn a_change_is_whole_or_none_when_its_client_goes_away() {
    let daemon = Daemon::with_drives(4);
    let body = json!({ "name": "a", "level": "5", "drives": ["d0", "d1", "d2", "d3"] });
    let mut created = 0;
    for requests_before in 0..6 {
        let stream = send(&daemon, "POST", "/v1/arrays", &body.to_string());
        for _ in 0..requests_before {
            request(&daemon, "GET", "/v1/openapi.json", &Value::Null);
        }
        drop(stream);
        // Changes take turns: after this one, the first has ended or will never begin.
        daemon.run("drive detach nonesuch");
        let arrays = daemon.json("array list");
        if arrays[0].is_null() {
            let drives = daemon.json("drive list");
            let blank = |drive: &Value| drive["content"] == "blank" && drive["state"] == "free";
            assert!(drives.as_array().unwrap().iter().all(blank), "{drives}");
            continue;
        }
        created += 1;
        assert_eq!(arrays[0]["state"], "optimal");
        daemon.ok("volume create v --array a --size 16M");
        daemon.ok("array delete a --force");
    }
    assert!(created > 0, "{}", daemon.log());
}

#[test]
fn half_a_request_and_nonsense_harm_nobody() {
    let daemon = Daemon::start();
    for bytes in [&b"POST /v1/arrays HTTP/1.1\r\ncontent-length: 1000\r\n\r\n{"[..], &[0; 4096]] {
        let mut stream = UnixStream::connect(daemon.path("api.sock")).unwrap();
        stream.write_all(bytes).unwrap();
    }
    daemon.ok("status");
}

#[test]
fn silent_clients_use_up_nothing() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    const CLIENTS: usize = 200;
    let limit = getrlimit(Resource::Nofile);
    // Inherited by the daemon, which has more use for descriptors than this.
    setrlimit(Resource::Nofile, Rlimit { current: Some(700), ..limit }).unwrap();
    let daemon = Daemon::start();
    let limits = std::fs::read_to_string(daemon.proc("limits")).unwrap();
    let mut files = limits.lines().find(|line| line.starts_with("Max open")).unwrap().split(' ');
    let words: Vec<&str> = files.by_ref().filter(|word| !word.is_empty()).collect();
    assert_eq!(words[3], words[4], "{limits}");
    assert_ne!(words[3], "700", "{limits}");
    let descriptors = || std::fs::read_dir(daemon.proc("fd")).unwrap().count();
    let before = descriptors();
    // The last one's answers are more than it could be sent without its reading them.
    let many = b"GET /v1/status HTTP/1.1\r\nhost: a\r\n\r\n".repeat(3000);
    let halves = [
        &b""[..],
        b"GET /v1/sta",
        b"POST /v1/drives HTTP/1.1\r\ncontent-length: 9\r\n\r\n{",
        &many,
    ];
    let silent: Vec<UnixStream> = (0..CLIENTS)
        .map(|client| {
            let mut stream = UnixStream::connect(daemon.path("api.sock")).unwrap();
            stream.write_all(halves[client % halves.len()]).unwrap();
            stream
        })
        .collect();
    // Answered once those before it have been hung up on.
    daemon.ok("status");
    assert!(descriptors() < before + 150, "{}", descriptors());
    // They hang on until they read, if nobody hangs up on them.
    let mut looks = 0;
    while descriptors() > before {
        daemon.ok("status");
        looks += 1;
        assert!(looks < 30_000, "{} of {before} descriptors", descriptors());
    }
    let hung_up = |mut stream: &UnixStream| {
        stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        let read = stream.read_to_end(&mut Vec::new());
        read.is_ok() || read.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset)
    };
    assert!(silent.iter().all(hung_up));
}

#[test]
fn one_of_two_equal_changes_wins() {
    let daemon = Daemon::with_drives(3);
    let body = json!({ "name": "a", "level": "5", "drives": ["d0", "d1", "d2"] }).to_string();
    let mut rivals: Vec<_> = (0..4).map(|_| send(&daemon, "POST", "/v1/arrays", &body)).collect();
    let answers: Vec<String> = rivals
        .iter_mut()
        .map(|rival| {
            let mut text = String::new();
            rival.read_to_string(&mut text).unwrap();
            text
        })
        .collect();
    let won = answers.iter().filter(|text| text.starts_with("HTTP/1.1 200")).count();
    let lost = answers.iter().filter(|text| text.starts_with("HTTP/1.1 409")).count();
    assert_eq!((won, lost), (1, 3), "{answers:?}");
    assert_eq!(daemon.array_state("a"), "optimal");
}

#[test]
fn lists_are_in_the_order_in_which_people_count() {
    let daemon = Daemon::with_drives(11);
    let names = |line: &str| -> Vec<String> {
        let list = daemon.json(line);
        let names = list.as_array().unwrap().iter().map(|its| its["name"].as_str().unwrap());
        names.map(str::to_owned).collect()
    };
    let drives: Vec<String> = (0..11).map(|index| format!("d{index}")).collect();
    assert_eq!(names("drive list"), drives);
    daemon.ok(&format!("array create a --level 6 --drives {}", drives.join(",")));
    assert_eq!(daemon.json("status")["cores"][0]["drives"], json!(drives));
    for name in ["v10", "v9"] {
        daemon.ok(&format!("volume create {name} --array a --size 1M"));
        daemon.ok(&format!("export create {name} --volume {name}"));
    }
    assert_eq!(names("volume list"), ["v9", "v10"]);
    assert_eq!(names("export list"), ["v9", "v10"]);
}
