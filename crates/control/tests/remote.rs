//! Goal: a drive of another host is attached, shown, used and refused like any other; an array with
//! one outlives the way to it, takes it back by itself, and reads what was written.
//! Method: the target of the reactor's tests in this process, told to go away and come back, under
//! load that compares what it reads.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

mod daemon;
#[path = "../../reactor/tests/remote/model.rs"]
#[expect(dead_code, reason = "the reactor's tests use all of it")]
mod model;

use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use daemon::{DRIVE_BYTES, Daemon};
use model::{Faults, Model, NAMESPACE, SUBSYSTEM};

/// Of two seconds each, while the connections are cut.
const LOADS_MAX: u32 = 60;

fn target(volatile_cache: bool) -> Model {
    let bytes = usize::try_from(DRIVE_BYTES).unwrap();
    Model::start(Faults { bytes, volatile_cache, ..Faults::default() })
}

fn address(model: &Model) -> String {
    format!("nvme-tcp://{}/{SUBSYSTEM}?nsid={NAMESPACE}", model.address)
}

/// An array of a drive here and one there, and an export of it.
fn mirror(model: &Model) -> Daemon {
    let daemon = Daemon::with_drives(1);
    daemon.ok(&format!("drive attach {} --name far", address(model)));
    daemon.ok("array create a --level 1 --drives d0,far");
    daemon.ok("volume create v --array a --size 24M");
    daemon.ok("export create e --volume v");
    daemon
}

fn work(daemon: &Daemon, seconds: f32) -> String {
    let socket = daemon.path("export/e.sock");
    let (socket, load) =
        (socket.display(), "--rw randrw --verify --force --depth 8 --size 4M --warm-up 0");
    daemon.ok(&format!("bench vhost --socket {socket} {load} --seconds {seconds}"))
}

#[test]
fn it_is_shown_with_how_it_is_reached() {
    let model = target(true);
    let daemon = Daemon::with_drives(1);
    let line = format!("drive attach {}&ddgst=1", address(&model));
    let attached = daemon.ok(&line);
    assert!(attached.starts_with("drive model-n3 attached: 64M, blank"), "{attached}");
    let shown = daemon.json("drive show model-n3");
    assert_eq!((&shown["kind"], &shown["sector_bytes"]), (&"remote".into(), &512.into()));
    let path = &shown["path"];
    assert_eq!((&path["state"], &path["transport"]), (&"idle".into(), &"nvme-tcp".into()));
    assert_eq!(path["address"], model.address.to_string());
    assert_eq!((&path["subsystem"], &path["namespace"]), (&SUBSYSTEM.into(), &3.into()));
    assert_eq!((&path["header_digest"], &path["data_digest"]), (&false.into(), &true.into()));
    assert!(path["host_nqn"].as_str().unwrap().starts_with("nqn.2014-08.org.nvmexpress:uuid:"));
    daemon.ok("array create a --level 1 --drives d0,model-n3");
    let text = daemon.ok("drive show model-n3");
    for line in
        ["transport nvme-tcp", "digests   data", "cache     volatile", "path      connected"]
    {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert!(daemon.refused(&format!("{line} --name again")).contains("attached already"));
}

#[test]
fn who_only_looked_at_a_drive_is_not_taken_for_dead() {
    let far = Daemon::with_array(0, 3);
    far.ok("volume create v --array a --size 70M");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (listen, nqn) = (format!("127.0.0.1:{port}"), "nqn.2026-01.example:far");
    far.ok(&format!("export create e --volume v --kind nvme-tcp --listen {listen} --nqn {nqn}"));
    let daemon = Daemon::start();
    daemon.ok(&format!("drive attach nvme-tcp://{listen}/{nqn} --name far"));
    let export = far.wait_for("export show e", |export| export["state"] == "listening");
    assert_eq!(export["error"], serde_json::Value::Null, "{export}");
    assert!(!far.log().contains("sign of life"), "{}", far.log());
    // It connects again when it is needed.
    daemon.ok("array create b --level 0 --drives far");
    assert_eq!(daemon.array_state("b"), "optimal");
}

#[test]
fn refusals_name_the_fix() {
    let model = target(false);
    let daemon = Daemon::start();
    let at = |rest: &str| format!("drive attach nvme-tcp://{}{rest}", model.address);
    let listed = daemon.refused(&at(""));
    assert!(listed.contains(&format!("nvme-tcp://192.0.2.1:4420/{SUBSYSTEM}")), "{listed}");
    assert!(!listed.contains("other"), "{listed}");
    assert!(daemon.refused(&at("/nqn.nobody")).contains("lists what the host offers"));
    let wrong = daemon.refused(&at(&format!("/{SUBSYSTEM}?nsid=2")));
    assert!(wrong.contains("no namespace 2, but 1, 3"), "{wrong}");
    let wrong = daemon.refused(&at(&format!("/{SUBSYSTEM}?nsid=3 --size 64M")));
    assert!(wrong.contains("leave --size out"), "{wrong}");
    assert!(daemon.refused(&at("/nqn.x?tls=1")).contains("nsid=N"));
    model.faults().host = Some("nqn.someone".into());
    let stranger = daemon.refused(&at(&format!("/{SUBSYSTEM}?nsid=3")));
    assert!(stranger.contains("let host nqn.2014-08.org.nvmexpress:uuid:"), "{stranger}");
    model.faults().closed = true;
    let away = daemon.refused(&at(&format!("/{SUBSYSTEM}?nsid=3")));
    assert!(away.contains("check that a target listens"), "{away}");
}

#[test]
fn a_connection_that_is_lost_for_moments_costs_nothing() {
    let model = target(false);
    let daemon = mirror(&model);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let wanted = (0..LOADS_MAX).take_while(|_| !done.load(Ordering::Relaxed));
            wanted.for_each(|_| drop(work(&daemon, 2.0)));
        });
        daemon.wait_for("drive show far", |drive| {
            // A try to connect is not cut, however long it takes: the drive would be given up.
            if drive["path"]["state"] == "connected" {
                model.cut();
                std::thread::park_timeout(Duration::from_millis(300));
            }
            load.is_finished() || drive["path"]["reconnects"].as_u64() > Some(3)
        });
        done.store(true, Ordering::Relaxed);
        load.join().unwrap();
    });
    let shown = daemon.json("drive show far");
    assert_eq!((&shown["state"], &shown["health"]), (&"member".into(), &"healthy".into()));
    assert!(shown["path"]["reconnects"].as_u64().unwrap() > 3, "{shown}");
    daemon.is_whole();
}

/// It was deleted and made anew, say.
#[test]
fn another_namespace_in_its_place_is_told_from_one_that_is_away() {
    let model = target(false);
    let daemon = mirror(&model);
    model.faults().nguid = [8; 16];
    model.cut();
    daemon.wait_for("drive show far", |drive| drive["path"]["state"] == "another");
    daemon.wait_for("array show a", |array| array["state"] == "degraded");
    let said = daemon.ok("status");
    assert!(said.contains("another namespace answers at the address of drive far"), "{said}");
    assert!(said.contains("drive far is another now; `ashlar array replace a"), "{said}");
    daemon.ok("drive detach far --force");
    let attach = format!("drive attach {} --name new", address(&model));
    // The model has the bytes of the one before.
    daemon.ok(&attach);
    daemon.ok("array replace a --member 1 --new new --force --wait");
    daemon.is_whole();
}

/// With a volatile cache nobody knows what it has lost; without one it is away for too long.
#[test]
fn a_drive_that_was_gone_is_taken_back_and_caught_up() {
    for volatile_cache in [true, false] {
        let model = target(volatile_cache);
        let daemon = mirror(&model);
        work(&daemon, 0.5);
        model.faults().closed = true;
        model.cut();
        std::thread::scope(|scope| {
            let load = scope.spawn(|| work(&daemon, 12.0));
            daemon.wait_for("array show a", |array| array["state"] == "degraded");
            let shown = daemon.json("drive show far");
            assert_eq!(
                (&shown["path"]["state"], &shown["health"]),
                (&"lost".into(), &"failed".into())
            );
            let said = daemon.ok("status");
            assert!(
                said.contains("drive far is not reached; it is taken back once it is"),
                "{said}"
            );
            assert!(!said.contains("drive far has failed"), "{said}");
            model.faults().closed = false;
            daemon.wait_for("array show a", |array| array["state"] == "optimal");
            load.join().unwrap();
        });
        assert_eq!(daemon.json("drive show far")["path"]["state"], "connected");
        daemon.is_whole();
    }
}

#[test]
fn a_drive_that_is_not_there_at_the_start_is_taken_back_when_it_is() {
    let model = target(true);
    let mut daemon = mirror(&model);
    work(&daemon, 0.5);
    daemon.stop();
    model.faults().closed = true;
    daemon.start_again();
    assert_eq!(daemon.json("drive show far")["state"], "missing");
    assert_eq!(daemon.array_state("a"), "degraded");
    work(&daemon, 0.5);
    model.faults().closed = false;
    daemon.is_whole();
    assert_eq!(daemon.json("drive show far")["state"], "member");
    work(&daemon, 0.5);
}

/// Two volumes of one other host, mirrored here: both ways are lost at once when its daemon ends.
fn mirror_of_one_host(drives: &str) -> (Daemon, Daemon) {
    let far = Daemon::start();
    let drive = |number| {
        far.make_drive(&format!("d{number}"));
        far.ok(&format!("drive attach {drives}@/d{number}.img"));
    };
    (0..4).for_each(drive);
    far.create_array("b", 0, 4);
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (listen, nqn) = (format!("127.0.0.1:{port}"), "nqn.2026-01.example:far");
    let near = Daemon::start();
    for leg in [1, 2] {
        far.ok(&format!("volume create v{leg} --array b --size 70M"));
        let at = format!("--kind nvme-tcp --listen {listen} --nqn {nqn}");
        far.ok(&format!("export create e{leg} --volume v{leg} {at}"));
        near.ok(&format!("drive attach nvme-tcp://{listen}/{nqn}?nsid={leg} --name leg{leg}"));
    }
    near.ok("array create a --level 1 --drives leg1,leg2");
    near.ok("volume create v --array a --size 24M");
    near.ok("export create e --volume v");
    (far, near)
}

fn has_written(daemon: &Daemon) {
    daemon.wait_for("export show e", |its| its["counters"]["writes"].as_u64() > Some(0));
}

/// What its drives have is there as long as its machine has power, flushed or not.
#[test]
fn all_of_an_array_behind_one_daemon_outlives_that_daemon() {
    let (mut far, near) = mirror_of_one_host("");
    let is_back = |more_than: u64| {
        for leg in ["leg1", "leg2"] {
            near.wait_for(&format!("drive show {leg}"), |drive| {
                drive["path"]["state"] == "connected"
                    && drive["path"]["reconnects"].as_u64() > Some(more_than)
            });
        }
    };
    std::thread::scope(|scope| {
        let load = scope.spawn(|| work(&near, 20.0));
        has_written(&near);
        far.kill();
        far.start_again();
        is_back(0);
        far.ok("upgrade");
        is_back(1);
        load.join().unwrap();
    });
    let log = near.log();
    assert!(!log.contains("degraded") && !log.contains("is not reached"), "{log}");
    near.is_whole();
}

/// Where it may be lost, nothing is gone on with as if it were there.
#[test]
fn of_drives_that_forget_with_their_daemon_that_is_not_believed() {
    let (mut far, near) = mirror_of_one_host("lossy:");
    let socket = near.path("export/e.sock");
    let load = "--rw randwrite --force --depth 8 --size 4M --warm-up 0 --seconds 30";
    let line = format!("bench vhost --socket {} {load}", socket.display());
    std::thread::scope(|scope| {
        let load = scope.spawn(|| near.run(&line));
        has_written(&near);
        far.kill();
        near.wait_for("array show a", |array| array["state"] == "failed");
        assert!(!load.join().unwrap().status.success(), "its writes fail");
    });
}
