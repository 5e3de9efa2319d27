//! Goal: an array over two hosts loses nothing while the network between them breaks and heals, and
//! is whole again by itself; so it is while the other host's daemon is killed.
//! Method: two daemons in two network namespaces with a cable between them (`veth`), load that
//! compares what it reads, the cable pulled for moments and for long. It needs root for that, and
//! says so where it cannot be.
#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use std::process::Command;
use std::time::Duration;

use daemon::Daemon;

const THERE: &str = "10.213.7.2";
const NQN: &str = "nqn.2026-01.test:there";

/// Two network namespaces and a cable; gone when it is dropped.
struct Network {
    here: String,
    there: String,
}

impl Network {
    /// `None`: this process may not.
    fn new() -> Option<Network> {
        let id = std::process::id();
        let made = Network { here: format!("ashlar-{id}-a"), there: format!("ashlar-{id}-b") };
        let (here, there) = (&made.here, &made.there);
        let lines = [
            format!("netns add {here}"),
            format!("netns add {there}"),
            format!("link add cable netns {here} type veth peer name cable netns {there}"),
            format!("-n {here} addr add 10.213.7.1/24 dev cable"),
            format!("-n {there} addr add {THERE}/24 dev cable"),
            format!("-n {here} link set cable up"),
            format!("-n {there} link set cable up"),
        ];
        lines.iter().all(|line| ip(line)).then_some(made)
    }

    fn set_cable(&self, is_there: bool) {
        let state = if is_there { "up" } else { "down" };
        assert!(ip(&format!("-n {} link set cable {state}", self.there)));
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for namespace in [&self.here, &self.there] {
            ip(&format!("netns delete {namespace}"));
        }
    }
}

fn ip(line: &str) -> bool {
    let done = Command::new("ip").args(line.split(' ')).output();
    done.is_ok_and(|output| output.status.success())
}

fn pause(seconds: u64) {
    std::thread::park_timeout(Duration::from_secs(seconds));
}

/// A daemon there that offers a volume, and one here with an array of two drives and that one.
fn hosts(network: &Network) -> (Daemon, Daemon) {
    let there = Daemon::start_in(&network.there, 2, &["--poll-us", "0"]);
    there.ok("drive attach @/t0.img --size 256M");
    there.ok("array create t --level 0 --drives t0");
    there.ok("volume create t --array t --size 128M");
    there.ok(&format!(
        "export create t --volume t --kind nvme-tcp --listen {THERE}:4420 --nqn {NQN}"
    ));
    let here = Daemon::start_in(&network.here, 1, &["--poll-us", "0"]);
    here.ok("drive attach @/d0.img --size 128M");
    here.ok("drive attach @/d1.img --size 128M");
    let listed = here.refused(&format!("drive attach nvme-tcp://{THERE}:4420"));
    assert!(listed.contains(NQN), "{listed}");
    here.ok(&format!("drive attach nvme-tcp://{THERE}/{NQN} --name far"));
    here.ok("array create a --level 5 --drives d0,d1,far");
    here.ok("volume create v --array a --size 64M");
    here.ok("export create e --volume v");
    (there, here)
}

fn work(daemon: &Daemon, seconds: u32) {
    let socket = daemon.path("export/e.sock");
    let load = "--rw randrw --mix 50 --verify --force --depth 8 --size 8M --warm-up 0";
    daemon.ok(&format!("bench vhost --socket {} {load} --seconds {seconds}", socket.display()));
}

#[test]
fn an_array_over_two_hosts_outlives_the_network_and_the_other_daemon() {
    let Some(network) = Network::new() else {
        return daemon::not_tried("`ip netns add` makes no network here: it takes root, and `ip`");
    };
    let (mut there, here) = hosts(&network);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| work(&here, 30));
        // For a moment: what is sent meanwhile is sent again by TCP.
        pause(1);
        network.set_cable(false);
        pause(1);
        network.set_cable(true);
        pause(2);
        // For so long that it is given up.
        network.set_cable(false);
        here.wait_for("array show a", |array| array["state"] == "degraded");
        network.set_cable(true);
        here.wait_for("array show a", |array| array["state"] == "optimal");
        load.join().unwrap();
    });
    here.is_whole();
    std::thread::scope(|scope| {
        let load = scope.spawn(|| work(&here, 10));
        pause(1);
        there.kill();
        there.start_again();
        load.join().unwrap();
    });
    here.is_whole();
    let far = here.json("drive show far");
    assert_eq!((&far["state"], &far["path"]["state"]), (&"member".into(), &"connected".into()));
    work(&here, 1);
}
