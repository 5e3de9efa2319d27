//! Goal: an array on demand is where its guest is, on one host at a time, with all that was
//! acknowledged; it does not bounce, and outlives kills and upgrades in any state.
//! Method: a daemon that offers drives by NVMe/TCP, and two that call themselves hosts and share
//! them. Guests are front ends whose rings are made by hand: one that moves stops its rings at one
//! host, as QEMU does, and starts them at the other.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

mod daemon;
#[path = "../../target/tests/export/front_end.rs"]
#[expect(dead_code, reason = "the target's tests use all of it")]
mod front_end;

use std::fs::File;
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use daemon::Daemon;
use front_end::{FEATURES, FrontEnd, LOG_ALL, RING_SIZE, within};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;

const NQN: &str = "nqn.2026-01.test:d";
const DRIVES: usize = 2;
const QUEUES: u16 = 2;
const DATA: u64 = 8 << 20;
const BLOCK: u32 = 8192;
/// How often the daemon looks at guests.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
const TOGGLES: usize = 20;
/// An array stays for so long after its last ring was stopped, and after it came.
const STAY_SECONDS: u64 = 5;
const TRIES: u32 = 5;
const KIND_IN: u32 = 0;
const KIND_OUT: u32 = 1;

/// The daemon with the drives, and two hosts with an array on demand, which is at neither.
struct Hosts {
    _store: Daemon,
    /// Of the store.
    port: u16,
    a: Daemon,
    b: Daemon,
}

impl Hosts {
    fn new() -> Hosts {
        let store = Daemon::start_beside(9, &["--poll-us", "0"]);
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        store.ok("drive attach @/t.img --size 512M");
        store.ok("array create t --level 0 --drives t");
        for drive in 0..DRIVES {
            store.ok(&format!("volume create t{drive} --array t --size 96M"));
            store.ok(&format!(
                "export create t{drive} --volume t{drive} --kind nvme-tcp \
                 --listen 127.0.0.1:{port} --nqn {NQN}{drive}"
            ));
        }
        // Both have the drives before there is anything on them.
        let hosts = [1, 2].map(|number| {
            let host = Daemon::start_beside(number, &["--poll-us", "0"]);
            (0..DRIVES).for_each(|drive| attach(&host, port, drive));
            (number, host)
        });
        let [a, b] = hosts.map(|(number, host)| {
            if number == 1 {
                host.ok("array create a --level 1 --drives far0,far1");
                host.ok("volume create v --array a --size 32M");
            } else {
                host.ok("array start --scan");
            }
            host.ok(&format!("export create e --volume v --queues {QUEUES}"));
            host.ok("array stop a");
            let said = host.ok("array on-demand a");
            assert!(said.contains("array a is on demand: stopped, on demand"), "{said}");
            host
        });
        Hosts { _store: store, port, a, b }
    }
}

fn attach(host: &Daemon, port: u16, drive: usize) {
    host.ok(&format!("drive attach nvme-tcp://127.0.0.1:{port}/{NQN}{drive} --name far{drive}"));
}

fn guest_at(host: &Daemon) -> FrontEnd {
    FrontEnd::started(&host.path("export/e.sock"), QUEUES)
}

/// A block of a guest that can be told from all others.
fn block(number: u64) -> Vec<u8> {
    (0..u64::from(BLOCK) / 8).flat_map(|word| (number << 32 | word).to_le_bytes()).collect()
}

/// A request of each queue, acknowledged.
fn work(guest: &mut FrontEnd, kind: u32, number: u64) -> Vec<Vec<u8>> {
    let queues = 0..usize::from(QUEUES);
    let status = queues.clone().map(|queue| {
        let at = DATA + queue as u64 * u64::from(BLOCK);
        let number = number + queue as u64;
        guest.put(at, &if kind == KIND_OUT { block(number) } else { vec![0xee; BLOCK as usize] });
        let data = (at, BLOCK, kind == KIND_IN);
        let status = guest.request(queue, 0, kind, number * u64::from(BLOCK) / 512, data);
        guest.offer(queue, 0);
        guest.kick(queue);
        status
    });
    let status: Vec<u64> = status.collect();
    for (queue, status) in queues.clone().zip(status) {
        guest.wait_used(queue, 1);
        assert_eq!(guest.get(status, 1), [0]);
    }
    let at = |queue: usize| DATA + queue as u64 * u64::from(BLOCK);
    queues.map(|queue| guest.get(at(queue), BLOCK as usize)).collect()
}

fn write(guest: &mut FrontEnd, number: u64) {
    work(guest, KIND_OUT, number);
}

fn is_there(guest: &mut FrontEnd, number: u64) {
    let found = work(guest, KIND_IN, number);
    let expected: Vec<_> = (0..u64::from(QUEUES)).map(|queue| block(number + queue)).collect();
    assert!(found == expected, "block {number} is not as it was written");
}

fn stop_rings(guest: &FrontEnd) {
    for queue in 0..usize::from(QUEUES) {
        guest.front.get_vring_base(queue).unwrap();
    }
}

/// Goes on where the guest's rings stand, as QEMU does: with no log.
fn start_rings(guest: &mut FrontEnd) {
    guest.front.set_features(FEATURES).unwrap();
    (0..usize::from(QUEUES)).for_each(|queue| guest.start(queue, guest.used_index(queue)));
}

/// What QEMU says at the end of a move, or of a try: the rings are stopped while it logs.
fn leave(guest: &FrontEnd) {
    guest.front.set_features(FEATURES | LOG_ALL).unwrap();
    stop_rings(guest);
}

/// Each look takes some milliseconds, and a lease that is watched half a minute.
fn wait_state(host: &Daemon, state: &str) {
    assert!(within(60_000, || host.array_state("a") == state), "not {state}: {}", host.log());
}

fn wait_away(host: &Daemon) {
    wait_state(host, "stopped");
}

fn count(host: &Daemon, what: &str) -> usize {
    host.log().matches(what).count()
}

#[test]
fn an_array_goes_with_its_guest_and_back() {
    let Hosts { _store, a, b, .. } = Hosts::new();
    let mut at_a = guest_at(&a);
    write(&mut at_a, 0);
    let shown = a.json("array show a");
    assert_eq!((&shown["state"], &shown["on_demand"]), (&"optimal".into(), &true.into()));
    assert!(a.ok("array list").contains("optimal, on demand"));
    // The guest is prepared there, with memory and all; nothing is taken from here.
    let mut at_b = FrontEnd::connect(&b.path("export/e.sock"), QUEUES);
    at_b.front.add_mem_region(&at_b.region()).unwrap();
    b.wait_for("export show e", |export| export["state"] == "connected");
    assert_eq!(b.array_state("a"), "stopped");
    let mut number = 0;
    for round in 0..2 {
        let (here, there) = if round == 0 { (&a, &b) } else { (&b, &a) };
        let (from, to) = if round == 0 { (&at_a, &mut at_b) } else { (&at_b, &mut at_a) };
        leave(from);
        // Before it is known that the other one has let go.
        start_rings(to);
        is_there(to, number);
        number += 2;
        write(to, number);
        assert_eq!(here.array_state("a"), "stopped");
        assert_eq!(there.array_state("a"), "optimal");
    }
    // A failed move: the guest goes on where it was, before the array is needed elsewhere.
    leave(&at_a);
    wait_away(&a);
    start_rings(&mut at_a);
    is_there(&mut at_a, number);
    for host in [&a, &b] {
        assert_eq!(count(host, "ERROR"), 0, "{}", host.log());
        let waited = waited_ms(host);
        // It was stopped, and its lease given back: else that is watched for longer.
        assert!(!waited.is_empty() && waited.iter().all(|ms| *ms < 20_000), "{waited:?}");
    }
}

/// How long guests of a host have waited for the array, each time.
fn waited_ms(host: &Daemon) -> Vec<u64> {
    let log = host.log();
    let said = log.split("waited_ms").skip(1);
    let numbers = said.map(|rest| {
        let from = rest.find(|c: char| c.is_ascii_digit()).unwrap();
        rest[from..].chars().take_while(char::is_ascii_digit).collect::<String>()
    });
    numbers.map(|number| number.parse().unwrap()).collect()
}

/// Its host died, and another one had the array meanwhile: what the guest knows of its disk is old.
#[test]
fn a_guest_that_was_at_work_before_another_host_had_the_array_does_not_go_on() {
    let Hosts { _store, mut a, b, .. } = Hosts::new();
    let mut stale = FrontEnd::connect(&a.path("export/e.sock"), QUEUES);
    let asked = VhostUserInflight::new(0, 0, QUEUES, RING_SIZE);
    let (region, log) = stale.front.get_inflight_fd(&asked).unwrap();
    begin(&mut stale, &region, &log);
    write(&mut stale, 0);
    let again = |guest: FrontEnd, host: &Daemon| {
        let mut guest = guest.again(&host.path("export/e.sock"));
        begin(&mut guest, &region, &log);
        guest
    };
    // The next daemon goes on with it.
    a.kill();
    a.start_again();
    let mut stale = again(stale, &a);
    is_there(&mut stale, 0);
    a.kill();
    let mut at_b = guest_at(&b);
    // Longer than an answer is waited for.
    wait_state(&b, "optimal");
    write(&mut at_b, 2);
    drop(at_b);
    wait_away(&b);
    a.start_again();
    // It brings the array here, and is sent away: at any moment, once a ring has started.
    let mut stale = stale.again(&a.path("export/e.sock"));
    give_memory(&mut stale, &region, &log);
    let _ = try_start_rings(&mut stale);
    let is_refused = |export: &serde_json::Value| {
        let why = export["error"].as_str().unwrap_or("");
        why.contains("before another host had the volume") && export["state"] == "listening"
    };
    a.wait_for("export show e", is_refused);
    let mut stale = stale.again(&a.path("export/e.sock"));
    assert!(stale.front.set_inflight_fd(&region, log.as_raw_fd()).is_err());
    // Nor does that keep the array here.
    wait_away(&a);
    let mut stale = stale.again(&a.path("export/e.sock"));
    assert!(stale.front.set_inflight_fd(&region, log.as_raw_fd()).is_err());
    assert_eq!(a.array_state("a"), "stopped");
    // One that starts anew has it.
    drop(stale);
    let mut guest = guest_at(&a);
    is_there(&mut guest, 2);
}

/// Also of an array that somebody starts by hand, where it is needed.
#[test]
fn a_guest_does_not_go_on_after_a_failover_and_back() {
    let Hosts { _store, mut a, b, .. } = Hosts::new();
    [&a, &b].iter().for_each(|host| drop(host.ok("array on-demand a --off")));
    a.ok("array start a");
    let mut guest = FrontEnd::connect(&a.path("export/e.sock"), QUEUES);
    let asked = VhostUserInflight::new(0, 0, QUEUES, RING_SIZE);
    let (region, log) = guest.front.get_inflight_fd(&asked).unwrap();
    begin(&mut guest, &region, &log);
    write(&mut guest, 0);
    // Of its own host it sees nothing but a pause, however often the array is started there.
    for stops in [false, true] {
        if stops {
            a.ok("array stop a --force");
            a.ok("array start a");
        } else {
            a.kill();
            a.start_again();
        }
        guest = guest.again(&a.path("export/e.sock"));
        begin(&mut guest, &region, &log);
        is_there(&mut guest, 0);
    }
    a.kill();
    b.ok("array start a");
    let mut at_b = guest_at(&b);
    write(&mut at_b, 0);
    b.ok("array stop a --force");
    drop(at_b);
    a.start_again();
    let mut guest = guest.again(&a.path("export/e.sock"));
    assert!(guest.front.set_inflight_fd(&region, log.as_raw_fd()).is_err());
    drop(guest);
    is_there(&mut guest_at(&a), 0);
}

/// As QEMU does it, also once it has lost its connection.
fn begin(guest: &mut FrontEnd, region: &VhostUserInflight, log: &File) {
    give_memory(guest, region, log);
    try_start_rings(guest).unwrap();
}

fn give_memory(guest: &mut FrontEnd, region: &VhostUserInflight, log: &File) {
    guest.front.set_inflight_fd(region, log.as_raw_fd()).unwrap();
    guest.front.add_mem_region(&guest.region()).unwrap();
}

fn try_start_rings(guest: &mut FrontEnd) -> vhost::Result<()> {
    (0..usize::from(QUEUES)).try_for_each(|queue| {
        guest.try_start_at(queue, guest.used_index(queue), &FrontEnd::addresses(queue))
    })
}

/// Waits until the error that is shown says all of it.
fn wait_error(host: &Daemon, line: &str, said: &[&str]) {
    host.wait_for(line, |shown| {
        let why = shown["error"].as_str().unwrap_or("");
        said.iter().all(|said| why.contains(said))
    });
}

#[test]
fn an_array_in_use_stays_and_who_waits_is_told() {
    let Hosts { _store, a, b, .. } = Hosts::new();
    let mut at_a = guest_at(&a);
    write(&mut at_a, 0);
    let mut at_b = guest_at(&b);
    wait_error(&b, "array show a", &["has array a", "no guest there"]);
    assert_eq!(b.array_state("a"), "unavailable");
    wait_error(&b, "export show e", &["its guest waits for array a"]);
    // Others change what they like meanwhile; longer than it takes to see that the lease lives.
    for _ in 0..4 {
        b.ok("drive attach @/x.img --size 64M");
        b.ok("drive detach x");
        std::thread::park_timeout(Duration::from_secs(3));
    }
    is_there(&mut at_a, 0);
    assert_eq!(count(&a, "let go"), 0);
    // Its guest is shut down.
    drop(at_a);
    is_there(&mut at_b, 0);
    assert_eq!(a.array_state("a"), "stopped");
}

/// A guest that boots stops its rings and starts them again, and a front end may play at moving.
#[test]
#[expect(clippy::disallowed_methods, reason = "a test's own clock")]
fn an_array_does_not_bounce() {
    let Hosts { _store, a, .. } = Hosts::new();
    for (features, first) in [(FEATURES, 0), (FEATURES | LOG_ALL, 1)] {
        let mut guest = guest_at(&a);
        write(&mut guest, 0);
        let before = count(&a, "let go: no guest");
        let began = std::time::Instant::now();
        for _ in 0..TOGGLES {
            guest.front.set_features(features).unwrap();
            stop_rings(&guest);
            // Longer than until it is looked at.
            std::thread::park_timeout(2 * LOOK_INTERVAL);
            start_rings(&mut guest);
            is_there(&mut guest, 0);
        }
        let bounced = count(&a, "let go: no guest") - before;
        // One that moves takes it along at once, if it has been here for as long as it stays; one
        // that does not leaves it here for as long.
        let most = began.elapsed().as_secs() / STAY_SECONDS + first;
        assert!(bounced as u64 <= most, "{bounced} times");
        drop(guest);
        wait_away(&a);
        assert!(within(30_000, || count(&a, "let go: no guest") == before + bounced + 1));
    }
}

#[test]
fn a_daemon_that_is_killed_or_exchanged_goes_on_as_it_was() {
    let Hosts { _store, mut a, b, .. } = Hosts::new();
    // At work.
    let mut guest = guest_at(&a);
    write(&mut guest, 0);
    assert_eq!(a.json("upgrade")["count"], 1);
    is_there(&mut guest, 0);
    a.kill();
    a.start_again();
    assert_eq!(a.json("export show e")["state"], "listening");
    let mut guest = guest_at(&a);
    is_there(&mut guest, 0);
    // Before it has let go, or just after: the next one does, and no lease has to be watched.
    leave(&guest);
    a.kill();
    a.start_again();
    drop(guest);
    assert_eq!(a.json("array show a")["on_demand"], true);
    wait_away(&a);
    // While a guest waits.
    let mut at_b = guest_at(&b);
    assert_eq!(b.json("upgrade")["count"], 1);
    is_there(&mut at_b, 0);
    assert_eq!(count(&b, "has array a"), 0, "{}", b.log());
    let mut at_a = guest_at(&a);
    a.wait_for("array show a", |array| array["state"] == "unavailable");
    assert_eq!(a.json("upgrade")["count"], 1);
    a.wait_for("array show a", |array| array["state"] == "unavailable");
    // Nor does who waits get it while the other one is exchanged.
    assert_eq!(b.json("upgrade")["count"], 2);
    is_there(&mut at_b, 0);
    assert_eq!(a.array_state("a"), "unavailable");
    drop(at_b);
    is_there(&mut at_a, 0);
    assert_eq!(b.array_state("a"), "stopped");
}

/// Its lease stands still, and is watched before it is taken over.
#[test]
fn a_host_that_died_with_the_array_does_not_keep_it() {
    let Hosts { _store, mut a, b, .. } = Hosts::new();
    let mut at_a = guest_at(&a);
    write(&mut at_a, 0);
    a.kill();
    let mut at_b = guest_at(&b);
    b.wait_for("array show a", |array| array["state"] == "unavailable");
    wait_state(&b, "optimal");
    is_there(&mut at_b, 0);
    a.start_again();
    let mut at_a = guest_at(&a);
    a.wait_for("array show a", |array| array["state"] == "unavailable");
    is_there(&mut at_b, 0);
    leave(&at_b);
    is_there(&mut at_a, 0);
}

/// One that has only a part of the drives may not know what was written to the others.
#[test]
fn a_host_that_lacks_a_drive_waits_for_it() {
    let Hosts { _store, port, a, b } = Hosts::new();
    b.ok("drive detach far1");
    let mut at_a = guest_at(&a);
    write(&mut at_a, 0);
    drop(at_a);
    wait_away(&a);
    let mut at_b = guest_at(&b);
    wait_error(&b, "array show a", &["newer data"]);
    assert_eq!(b.array_state("a"), "unavailable");
    attach(&b, port, 1);
    is_there(&mut at_b, 0);
    assert_eq!(b.array_state("a"), "optimal");
}

/// What the start lacked is there again: its guest does not wait until others have had their turn.
#[test]
fn a_drive_that_comes_back_is_tried_at_once() {
    let daemon = Daemon::with_array(1, DRIVES);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok(&format!("export create e --volume v --queues {QUEUES}"));
    daemon.ok("array stop a");
    daemon.ok("array on-demand a");
    let table = |number: usize| {
        let label = daemon.json(&format!("inspect @/d{number}.img"))["label"].clone();
        let areas = label["areas"].as_array().unwrap();
        let area = areas.iter().find(|area| area["name"] == "volume table").unwrap();
        let [at, len] = ["offset", "bytes"].map(|field| area[field].as_u64().unwrap());
        let path = daemon.path(&format!("d{number}.img"));
        (File::options().read(true).write(true).open(path).unwrap(), at, len as usize)
    };
    let tables: Vec<_> = (0..DRIVES).map(table).collect();
    let good: Vec<Vec<u8>> = tables
        .iter()
        .map(|(file, at, len)| {
            let mut good = vec![0; *len];
            file.read_exact_at(&mut good, *at).unwrap();
            file.write_all_at(&vec![1; *len], *at).unwrap();
            good
        })
        .collect();
    let mut guest = guest_at(&daemon);
    daemon.wait_for("array show a", |array| array["state"] == "unavailable");
    daemon.ok("drive detach d1");
    tables[1].0.write_all_at(&good[1], tables[1].1).unwrap();
    daemon.ok("drive attach @/d1.img");
    write(&mut guest, 0);
    is_there(&mut guest, 0);
    let waited = waited_ms(&daemon);
    assert!(waited.last().unwrap() < &30_000, "{waited:?}");
}

#[test]
fn what_exports_have_while_they_wait_is_changed_and_refused() {
    let Hosts { _store, a, b, .. } = Hosts::new();
    let at_b = FrontEnd::connect(&b.path("export/e.sock"), QUEUES);
    b.wait_for("export show e", |export| export["state"] == "connected");
    // Refusals, and what mends each.
    for (line, said) in [
        ("array on-demand a --off", "shut the guest down first"),
        ("array scrub a", "array on-demand a --off"),
        ("array stop a", "array on-demand a --off"),
        ("array delete a", "start it first"),
        ("export delete e", "shut the guest down first"),
        ("array on-demand b", "array list"),
    ] {
        let refused = b.refused(line);
        assert!(refused.contains(said), "{line}: {refused}");
    }
    assert!(!b.ok("array start --scan").contains("started"), "guests decide where it is");
    b.ok("export set e --read-iops 1000");
    drop(at_b);
    b.wait_for("export show e", |export| export["state"] == "listening");
    // What waits is found again, once what is in its way has gone.
    std::fs::write(b.path("precious"), "precious").unwrap();
    std::fs::rename(b.path("precious"), b.path("export/e.sock")).unwrap();
    b.wait_for("export show e", |export| export["error"].to_string().contains("is not a socket"));
    std::fs::remove_file(b.path("export/e.sock")).unwrap();
    b.wait_for("export show e", |export| export["state"] == "listening");
    assert_eq!(b.array_state("a"), "stopped");
    // Not on demand, it is an array as any.
    a.ok("array on-demand a");
    a.ok("array on-demand a --off");
    assert_eq!(a.json("export show e")["state"], "down");
    a.ok("array start a");
    a.ok("export create n --volume v --kind nbd");
    let refused = a.refused("array on-demand a");
    assert!(refused.contains("an export by nbd cannot tell"), "{refused}");
    a.ok("export delete n");
    a.ok("volume resize v --size 48M");
    a.ok("array on-demand a");
    // It goes by itself, soon, which is no change by who is refused.
    let refused = (0..TRIES).find_map(|_| {
        a.ok("array on-demand a --off");
        if a.array_state("a") == "stopped" {
            a.ok("array start a");
        }
        a.ok("array on-demand a");
        let said = a.try_refused("array stop a").ok()?;
        (a.array_state("a") == "optimal").then_some(said)
    });
    let refused = refused.expect("it is always let go at once");
    assert!(refused.contains("`ashlar array on-demand a --off` first"), "{refused}");
    let mut guest = guest_at(&a);
    write(&mut guest, 0);
    let refused = a.refused("export create n --volume v --kind nbd");
    assert!(refused.contains("an export by nbd cannot tell"), "{refused}");
    drop(guest);
    wait_away(&a);
    // The other host hears of what was done only when it has the array, and so does its guest.
    let mut at_b = guest_at(&b);
    write(&mut at_b, 0);
    assert_eq!(b.json("volume show v")["bytes"], 48 << 20);
    assert_eq!(b.json("export show e")["limits"]["read_iops"], 1000);
    drop(at_b);
    wait_away(&b);
    b.ok("export delete e");
    assert!(!b.path("export/e.sock").exists());
    let refused = b.refused("export create e --volume v");
    assert!(refused.contains("there is no volume v"), "{refused}");
    b.ok("array delete a --force");
}
