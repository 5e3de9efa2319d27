//! Goal: whatever initiators do, the daemon lives on, keeps nothing of theirs, and others notice
//! nothing.
//! Method: hostile vhost-user front ends, many lives of them, beside a guest of another export that
//! verifies what it reads. `ASHLAR_FUZZ_SECONDS` says for how long, `ASHLAR_FUZZ_SEED` from
//! which seed; without it, a new one.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

mod daemon;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use daemon::Daemon;

const SECONDS: u64 = 60;
/// Engine memory that stays in pools, of 64 MiB that an export may have under way.
const MEMORY_SLACK_KIB: u64 = 128 << 10;

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

fn seed() -> u64 {
    let any = || u64::from(RandomState::new().build_hasher().finish() as u32) << 24;
    let seed = setting("ASHLAR_FUZZ_SEED").unwrap_or_else(any);
    println!("ASHLAR_FUZZ_SEED={seed}");
    seed
}

/// Descriptors, threads and memory (KiB) of the daemon.
fn holds(daemon: &Daemon) -> [u64; 3] {
    let status = std::fs::read_to_string(daemon.proc("status")).expect("the daemon lives");
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    };
    let descriptors = std::fs::read_dir(daemon.proc("fd")).unwrap().count();
    [descriptors as u64, field("Threads:"), field("VmRSS:")]
}

/// A guest that reads and writes, and checks all of it, for as long as it is let.
fn bystander(daemon: &Daemon, seconds: u64) -> Child {
    let asked = "--socket @/good.sock --depth 4 --rw randrw --verify --force";
    let bench = format!("bench vhost {asked} --rounds 1 --seconds {seconds}");
    daemon.run_beside(seconds + 60, &bench)
}

struct Attack {
    over: &'static AtomicBool,
    threads: Vec<JoinHandle<()>>,
    lives: &'static AtomicU64,
}

impl Attack {
    /// `live`: one life of a client of the seed.
    fn on(
        socket: PathBuf,
        clients: u64,
        seed: u64,
        live: fn(&Path, u64) -> std::io::Result<()>,
    ) -> Attack {
        let over: &AtomicBool = Box::leak(Box::default());
        let lives: &AtomicU64 = Box::leak(Box::default());
        let client = |_| {
            let socket = socket.clone();
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let life = seed + lives.fetch_add(1, Ordering::Relaxed);
                    if let Err(error) = live(&socket, life) {
                        panic!("life {life}: {error}");
                    }
                }
            })
        };
        Attack { over, threads: (0..clients).map(client).collect(), lives }
    }

    fn end(self) -> u64 {
        self.over.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
        self.lives.load(Ordering::Relaxed)
    }
}

#[test]
fn hostile_clients_harm_nobody() {
    let seconds = setting("ASHLAR_FUZZ_SECONDS").unwrap_or(SECONDS);
    let daemon = Daemon::with_array(5, 3);
    for name in ["good", "bad"] {
        daemon.ok(&format!("volume create {name} --array a --size 24M"));
        daemon.ok(&format!("export create {name} --volume {name} --path @/{name}.sock --queues 4"));
    }
    let before = holds(&daemon);
    let mut good = bystander(&daemon, seconds);
    // One client at a time has an export; others wait for their turn.
    let attack = Attack::on(daemon.path("bad.sock"), 2, seed(), ashlar_fuzz::vhost::live);
    let ended = good.wait().unwrap();
    let lives = attack.end();
    println!("{lives} lives in {seconds} s");
    let mut said = String::new();
    std::io::Read::read_to_string(&mut good.stderr.take().unwrap(), &mut said).unwrap();
    assert!(ended.success(), "the guest of the other export: {said}\n{}", daemon.log());
    assert!(lives > seconds, "{lives} lives are too few to say anything");
    let counters = daemon.json("export show bad")["counters"].clone();
    println!("{counters}");
    for its in ["reads", "writes", "flushes", "discards", "errors"] {
        assert!(counters[its].as_u64() > Some(lives / 4), "they did not get far: {counters}");
    }

    // Who is well-behaved is served as before.
    daemon.wait_for("export show bad", |export| export["state"] == "listening");
    daemon.ok("bench vhost --socket @/bad.sock --ios 500 --rw randrw --verify --force --rounds 1");
    daemon.wait_for("export show bad", |export| export["state"] == "listening");
    let after = settled(&daemon, &before);
    assert!(
        after[0] <= before[0] && after[1] <= before[1],
        "descriptors and threads: {before:?}, {after:?}"
    );
    assert!(after[2] <= before[2] + MEMORY_SLACK_KIB, "KiB of memory: {before:?}, {after:?}");
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
}

/// What it holds once its connections have ended; idle threads of its API do after ten seconds.
fn settled(daemon: &Daemon, before: &[u64; 3]) -> [u64; 3] {
    for _ in 0..300 {
        let now = holds(daemon);
        if now[0] <= before[0] && now[1] <= before[1] {
            return now;
        }
        #[expect(clippy::disallowed_methods, reason = "a test's own thread")]
        std::thread::sleep(Duration::from_millis(100));
    }
    holds(daemon)
}
