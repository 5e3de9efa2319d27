//! Goal: an operator sees what each reactor does, what lives there, and how each drive is served.
//! Method: a daemon with arrays on files and on memory, told to use more and less of io_uring.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use daemon::Daemon;
use serde_json::Value;

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

/// How drive `d0` is served, once that is known.
fn settled_queue(daemon: &Daemon) -> Value {
    let is_settled = |drive: &Value| drive["queue"]["polling"]["why_not"] != "being tried";
    daemon.wait_for("drive show d0", is_settled);
    daemon.json("drive show d0")["queue"].clone()
}

#[test]
fn reactors_tell_what_they_do() {
    let daemon = Daemon::with_array(5, 3);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v");
    let before = daemon.json("status")["cores"][0].clone();
    assert_eq!(before["drives"], serde_json::json!(["d0", "d1", "d2"]));
    assert_eq!(before["exports"][0]["name"], "e");
    assert_eq!(before["exports"][0]["queues_active"], 0);
    let buffers = &before["memory"]["buffers"];
    let kinds = ["huge", "transparent", "small"].map(|kind| number(&buffers[kind]));
    assert!(kinds.iter().sum::<u64>() >= 16 << 20, "{buffers}");
    daemon.ok("array scrub a --wait");
    let cores = daemon.json("status --cpu");
    let (now, then) = (&cores[0]["counters"], &before["counters"]);
    for what in ["turns", "enters", "submissions", "completions", "busy_ns", "slept_ns"] {
        assert!(number(&now[what]) > number(&then[what]), "{what}: {now} after {then}");
    }
    let spent = number(&now["busy_ns"]) + number(&now["slept_ns"]);
    // It is told in whole seconds, and cores are there a moment before it is counted.
    let uptime = number(&daemon.json("status")["uptime_s"]) + 2;
    assert!(spent < uptime * 1_000_000_000, "{now} in {uptime} s");
    assert!(number(&now["busy_ppm"]) > 0, "{now}");
    let setup = &cores[0]["io_uring"]["setup"];
    assert!(setup.is_array() && cores[0]["io_uring"]["features"].is_array(), "{cores}");
    let shown = daemon.ok("status --cpu");
    for word in ["BUSY", "d0, d1, d2", "e (0)", "io_uring of CPU", "memory: buffers"] {
        assert!(shown.contains(word), "{word}: {shown}");
    }
    assert!(daemon.ok("status").contains("memory: buffers"));
}

#[test]
fn drives_tell_how_they_are_served() {
    let mut daemon = Daemon::with_array(1, 2);
    let queue = settled_queue(&daemon);
    assert_eq!(queue["polling"]["why_not"], "not a block device");
    assert_eq!(queue["registered_file"]["used"], true, "{queue}");
    assert_eq!(queue["fixed_buffers"]["used"], true, "{queue}");
    assert!(number(&queue["depth_max"]) > 0, "{queue}");
    let shown = daemon.ok("drive show d0");
    assert!(shown.contains("queue     io_uring, registered file, fixed buffers, "), "{shown}");
    daemon.stop();
    for (options, word) in
        [(&["--no-iopoll"][..], "SINGLE_ISSUER"), (&["--no-iopoll", "--sqpoll"], "SQPOLL")]
    {
        daemon.start_again_with(options);
        assert_eq!(settled_queue(&daemon)["polling"]["why_not"], "switched off");
        let cores = daemon.json("status --cpu");
        assert!(cores[0]["io_uring"].to_string().contains(word), "{cores}");
        daemon.ok("array scrub a --wait");
        assert_eq!(daemon.array_state("a"), "optimal");
        daemon.stop();
    }
    daemon.start_again_with(&[]);
    daemon.ok("array stop a");
    assert_eq!(daemon.json("drive show d0")["queue"], Value::Null);
}

#[test]
fn memory_that_serves_as_drives_is_counted() {
    let daemon = Daemon::start();
    for name in ["d0", "d1"] {
        daemon.ok(&format!("drive attach ram:64M --name {name}"));
    }
    daemon.create_array("a", 1, 2);
    let drives = daemon.json("status")["cores"][0]["memory"]["drives"].clone();
    let kinds = ["huge", "transparent", "small"].map(|kind| number(&drives[kind]));
    assert_eq!(kinds.iter().sum::<u64>(), 128 << 20, "{drives}");
    assert_eq!(daemon.json("drive show d0")["queue"], Value::Null);
    daemon.ok("array delete a --force");
    daemon.ok("drive detach d0");
    daemon.ok("drive detach d1");
    daemon.wait_for("status", |status| {
        let its = &status["cores"][0]["memory"]["drives"];
        ["huge", "transparent", "small"].iter().all(|kind| its[*kind] == 0)
    });
}

/// The first two CPUs that may be used; `None`: there is one.
fn two_cpus() -> Option<[usize; 2]> {
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let mut cpus = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    Some([cpus.next()?, cpus.next()?])
}

#[test]
fn queues_of_an_export_are_spread_over_reactors() {
    let Some([first, second]) = two_cpus() else { return };
    let mut daemon = Daemon::with_array(5, 3);
    daemon.stop();
    let cores = format!("--cores={first},{second}");
    daemon.start_again_with(&[&cores]);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v --queues 4");
    let home = number(&daemon.json("array show a")["cpu"]);
    let cpus = |export: &str| -> Vec<u64> {
        let shown = daemon.json(&format!("export show {export}"));
        shown["parts"].as_array().unwrap().iter().map(|part| number(&part["cpu"])).collect()
    };
    let mut both = cpus("e");
    assert_eq!(both[0], home, "that of the array comes first");
    both.sort_unstable();
    assert_eq!(both, [first as u64, second as u64]);
    let socket = daemon.json("export show e")["socket"].as_str().unwrap().to_owned();
    let bench = format!("bench vhost --socket {socket} --queues 4 --ios 4000 --verify --force");
    for work in ["randrw", "write", "randread"] {
        daemon.ok(&format!("{bench} --rw {work}"));
    }
    let counters = &daemon.json("export show e")["counters"];
    assert!(number(&counters["reads"]) > 1000 && counters["errors"] == 0, "{counters}");
    // Whoever read.
    let of_array = number(&daemon.json("array show a")["counters"]["reads"]);
    assert!(of_array >= number(&counters["reads"]), "{of_array} {counters}");
    let metric = format!("ashlar_array_reads_total{{array=\"a\"}} {of_array}\n");
    assert!(daemon.ok("metrics").contains(&metric), "{metric}");
    for core in daemon.json("status --cpu").as_array().unwrap() {
        assert_eq!(core["exports"][0]["name"], "e", "{core}");
        assert!(core["node"].is_u64() && core["cache"].is_u64(), "{core}");
    }
    daemon.wait_unused("e");
    // One queue needs one reactor; and an operator may choose.
    daemon.ok("export delete e");
    daemon.ok("volume create w --array a --size 16M");
    daemon.ok("export create one --volume v --queues 1");
    assert_eq!(cpus("one"), [home]);
    let other = if home == first as u64 { second } else { first };
    daemon.ok(&format!("export create away --volume w --cores {other}"));
    assert_eq!(cpus("away"), [other as u64]);
    let said = daemon.refused("export create x --volume w --cores 999");
    assert!(said.contains("CPU 999") && said.contains("fix: use some of --cores"), "{said}");
    assert!(daemon.ok("export show away").contains(&format!("CPU {other} (0 queues)")));
    daemon.ok("volume resize w --size 24M");
    let socket = daemon.json("export show away")["socket"].as_str().unwrap().to_owned();
    daemon.ok(&format!("bench vhost --socket {socket} --size 24M --ios 2000 --verify --force"));
    daemon.wait_unused("away");
    // Nothing holds on to the drives, though no part of `away` was on their reactor.
    daemon.ok("array stop a");
    daemon.ok("array start a");
    assert_eq!(daemon.array_state("a"), "optimal");
    daemon.stop();
    daemon.start_again_with(&[&cores]);
    assert_eq!(daemon.json("export show away")["parts"][0]["cpu"], other);
}
