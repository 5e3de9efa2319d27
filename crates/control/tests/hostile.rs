//! Goal: whatever initiators do, the daemon lives on, keeps nothing of theirs, and others notice
//! nothing.
//! Method: hostile clients of vhost-user, NVMe/TCP and NBD, many lives of them, beside a guest of
//! another export that verifies what it reads. `ASHLAR_FUZZ_SECONDS` says for how long,
//! `ASHLAR_FUZZ_SEED` from which seed; without it, always the same, so that a change that fails has
//! done so by itself. New ones are tried by `cargo xtask fuzz`.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

mod daemon;

use std::fs::DirEntry;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use ashlar_fuzz::choices::Choices;
use ashlar_reactor::nvme::chap::Secret;
use daemon::Daemon;

const SECONDS: u64 = 60;
const SEED: u64 = 1;
/// A busy machine gets so much longer for the lives that were asked of a kind of client.
const LONGER_SECONDS_MAX: u64 = 300;
/// Of NVMe/TCP; below those that the kernel gives to whoever connects.
const PORT: u16 = 24120;
/// Engine memory that stays in pools: 64 MiB that each of the five exports may have under way.
/// Three minutes got as far as one.
const MEMORY_SLACK_KIB: u64 = 5 * (64 << 10);

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

fn seed() -> u64 {
    let seed = setting("ASHLAR_FUZZ_SEED").unwrap_or(SEED);
    println!("ASHLAR_FUZZ_SEED={seed}");
    seed
}

/// What a daemon has from the system.
#[derive(Debug)]
struct Holds {
    descriptors: usize,
    /// Their names, without those that no client of an export brings: the kernel's own workers, of
    /// which it keeps one of each kind, and those of the API.
    threads: Vec<String>,
    memory_kib: u64,
}

impl Holds {
    fn of(daemon: &Daemon) -> Holds {
        let status = std::fs::read_to_string(daemon.proc("status")).expect("the daemon lives");
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let tasks = std::fs::read_dir(daemon.proc("task")).unwrap();
        // One may end while it is looked at.
        let name = |task: std::io::Result<DirEntry>| {
            std::fs::read_to_string(task.unwrap().path().join("comm")).ok()
        };
        let brought =
            |name: &String| !["iou-wrk", "tokio-rt"].iter().any(|its| name.starts_with(its));
        Holds {
            descriptors: std::fs::read_dir(daemon.proc("fd")).unwrap().count(),
            threads: tasks.filter_map(name).filter(brought).collect(),
            memory_kib: resident.split_whitespace().next().unwrap().parse().unwrap(),
        }
    }

    /// No more of what clients bring, memory in pools apart.
    fn is_back_to(&self, before: &Holds) -> bool {
        self.descriptors <= before.descriptors && self.threads.len() <= before.threads.len()
    }
}

/// A guest that reads and writes, and checks all of it, for as long as it is let.
fn bystander(daemon: &Daemon, seconds: u64) -> Child {
    let asked = "--socket @/good.sock --depth 4 --rw randrw --verify --force";
    let bench = format!("bench vhost {asked} --rounds 1 --seconds {seconds}");
    daemon.run_beside(seconds + 60, &bench)
}

/// Clients of one kind.
struct Attack {
    client: &'static str,
    over: &'static AtomicBool,
    threads: Vec<JoinHandle<()>>,
    lives: &'static AtomicU64,
}

impl Attack {
    /// `live`: one life of a client that chooses so.
    fn on<L>(client: &'static str, threads: u64, seed: u64, live: L) -> Attack
    where
        L: Fn(Choices) -> std::io::Result<()> + Clone + Send + 'static,
    {
        let over: &AtomicBool = Box::leak(Box::default());
        let lives: &AtomicU64 = Box::leak(Box::default());
        let start = |_| {
            let live = live.clone();
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let life = seed + lives.fetch_add(1, Ordering::Relaxed);
                    if let Err(error) = live(Choices::of_seed(life, client)) {
                        panic!("life {life} of {client}: {error}");
                    }
                }
            })
        };
        Attack { client, over, threads: (0..threads).map(start).collect(), lives }
    }

    /// Once there were more lives than that, but not without end.
    fn end(self, lives_min: u64) -> u64 {
        let is_short = || self.lives.load(Ordering::Relaxed) <= lives_min;
        let is_alive = || self.threads.iter().any(|thread| !thread.is_finished());
        let mut looks = 0;
        while is_short() && is_alive() && looks < 10 * LONGER_SECONDS_MAX {
            looks += 1;
            #[expect(clippy::disallowed_methods, reason = "a test's own thread")]
            std::thread::sleep(Duration::from_millis(100));
        }
        self.over.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
        self.lives.load(Ordering::Relaxed)
    }
}

/// The exports that are attacked, by kind, with the words that make each; of `good` only, nothing
/// is known.
const BAD: [(&str, &str); 4] = [
    ("vhost", "--kind vhost-user-blk --queues 4 --path @/vhost.sock"),
    ("nvme", "--kind nvme-tcp --listen 127.0.0.1:24120 --nqn nqn.2026-01.example:bad"),
    ("proven", PROVEN),
    ("nbd", "--kind nbd --path @/nbd.sock"),
];

/// Its host has to prove who it is, and can.
const PROVEN: &str = "--kind nvme-tcp --listen 127.0.0.1:24120 \
                      --nqn nqn.2026-01.example:proven \
                      --host-secret nqn.2026-01.example:hostile=@/secret";

fn attacks(daemon: &Daemon, secret: Secret, seed: u64) -> [Attack; 4] {
    let vhost = daemon.path("vhost.sock");
    let nbd = daemon.path("nbd.sock");
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
    [
        // One client at a time has an export; others wait for their turn.
        Attack::on("vhost", 2, seed, move |its| ashlar_fuzz::vhost::live(&vhost, its)),
        Attack::on("nvme", 2, seed, move |its| {
            ashlar_fuzz::nvme_tcp::live(at, "nqn.2026-01.example:bad", None, its)
        }),
        Attack::on("proven", 2, seed, move |its| {
            ashlar_fuzz::nvme_tcp::live(at, "nqn.2026-01.example:proven", Some(&secret), its)
        }),
        Attack::on("nbd", 2, seed, move |its| ashlar_fuzz::nbd::live(&nbd, "nbd", its)),
    ]
}

#[test]
fn hostile_clients_harm_nobody() {
    let seconds = setting("ASHLAR_FUZZ_SECONDS").unwrap_or(SECONDS);
    let daemon = Daemon::with_array(5, 3);
    let secret = Secret::generate(None).unwrap();
    std::fs::write(daemon.path("secret"), secret.to_text().as_bytes()).unwrap();
    for (name, kind) in [("good", "--queues 4 --path @/good.sock")].iter().chain(&BAD) {
        daemon.ok(&format!("volume create {name} --array a --size 16M"));
        daemon.ok(&format!("export create {name} --volume {name} {kind}"));
    }
    let before = Holds::of(&daemon);
    let mut good = bystander(&daemon, seconds);
    let attacks = attacks(&daemon, secret, seed());
    let ended = good.wait().unwrap();
    let lives = attacks.map(|attack| (attack.client, attack.end(seconds)));
    println!("{lives:?} lives in {seconds} s or more");
    let mut said = String::new();
    std::io::Read::read_to_string(&mut good.stderr.take().unwrap(), &mut said).unwrap();
    assert!(ended.success(), "the guest of the other export: {said}\n{}", daemon.log());
    for (client, lives) in lives {
        let counters = daemon.json(&format!("export show {client}"))["counters"].clone();
        println!("{client}: {counters}");
        assert!(lives > seconds, "{lives} lives of {client} are too few to say anything");
        for its in ["reads", "writes", "flushes", "discards"] {
            let far = counters[its].as_u64() > Some(lives / 10);
            assert!(far, "{client} did not get far: {counters}");
        }
        // Who is well-behaved is served as before.
        daemon.wait_for(&format!("export show {client}"), |its| its["state"] == "listening");
    }
    let bench = "bench vhost --socket @/vhost.sock --ios 500 --rw randrw --verify --force";
    daemon.ok(&format!("{bench} --rounds 1"));
    daemon.wait_for("export show vhost", |export| export["state"] == "listening");
    let after = settled(&daemon, &before);
    assert!(after.is_back_to(&before), "{before:?}, {after:?}");
    let memory_kib = before.memory_kib + MEMORY_SLACK_KIB;
    assert!(after.memory_kib <= memory_kib, "{before:?}, {after:?}");
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
}

/// What it holds once its connections have ended.
fn settled(daemon: &Daemon, before: &Holds) -> Holds {
    for _ in 0..300 {
        let now = Holds::of(daemon);
        if now.is_back_to(before) {
            return now;
        }
        #[expect(clippy::disallowed_methods, reason = "a test's own thread")]
        std::thread::sleep(Duration::from_millis(100));
    }
    Holds::of(daemon)
}
