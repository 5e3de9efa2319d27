//! Goal: an operator can end the wait for drives that do not answer, whatever else waits for them;
//! a reactor that hangs keeps nobody from what it has no part in.
//! Method: drive files on a file system that is frozen, and reactors whose threads a debugger has
//! halted. Needs root.
#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;
#[path = "../../reactor/tests/mounted/mod.rs"]
mod mounted;

use std::fs::File;
use std::io::Read;
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Stdio};

use daemon::Daemon;
use mounted::Mounted;

const DRIVE_BYTES: u64 = 64 << 20;
/// Less than such drives are waited for otherwise.
const SOON_SECONDS: u64 = 40;
/// An export waits for so long for a reactor that hangs, and a little more.
const GIVE_UP_SECONDS: u64 = 100;
const TRIES: u32 = 5;
/// PTRACE_SEIZE and PTRACE_INTERRUPT of one thread, until its input ends (linux/ptrace.h).
const HALT: &str = "
import ctypes, os, sys
trace = ctypes.CDLL(None).ptrace
trace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
thread = int(sys.argv[1])
if trace(0x4206, thread, None, None) or trace(0x4207, thread, None, None):
    sys.exit(1)
os.waitpid(thread, 0x40000000)
os.write(1, b'.')
sys.stdin.read()
";

/// A reactor that hangs as long as this is there.
struct Halted(Child);

impl Halted {
    /// `None`: nobody can be halted here.
    fn new(daemon: &Daemon, cpu: u64) -> Option<Halted> {
        let name = format!("reactor-{cpu}\n");
        let mut threads = std::fs::read_dir(daemon.proc("task")).unwrap().map(|its| its.unwrap());
        let is_it = |comm: String| comm == name;
        let thread = threads
            .find(|its| std::fs::read_to_string(its.path().join("comm")).is_ok_and(is_it))
            .unwrap();
        let mut command = Command::new("python3");
        let thread = thread.file_name().into_string().unwrap();
        let command = command.args(["-c", HALT, &thread]).stdin(Stdio::piped());
        let mut halted = Halted(command.stdout(Stdio::piped()).spawn().unwrap());
        if halted.0.stdout.take().unwrap().read(&mut [0]).unwrap() == 1 {
            return Some(halted);
        }
        daemon::not_tried("no thread can be halted here: it takes root");
        None
    }
}

impl Drop for Halted {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[test]
fn a_reactor_that_hangs_keeps_nobody_from_other_changes() {
    let daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v");
    let Some(halted) = Halted::new(&daemon, home(&daemon, "a")) else { return };
    for line in [
        "upgrade",
        "upgrade --force",
        "array grow a",
        "array stop a --force",
        "array delete a --force",
    ] {
        let output = daemon.run(line);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{line}: {said}");
        assert!(said.contains("has not answered") && !said.contains("--force"), "{line}: {said}");
    }
    let deleted = daemon.run_beside(GIVE_UP_SECONDS, "export delete e --force");
    let output = deleted.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}\n{}", daemon.log());
    daemon.attach_new("d2");
    drop(halted);
    daemon.ok("array stop a");
}

/// The CPU of the reactor that has the array.
fn home(daemon: &Daemon, array: &str) -> u64 {
    daemon.json(&format!("array show {array}"))["cpu"].as_u64().unwrap()
}

#[test]
fn an_export_that_was_down_comes_up_beside_a_reactor_that_hangs() {
    comes_up_beside(Halted::new);
}

/// One that does not answer cannot be let go, which is tried again and again.
#[test]
fn an_export_that_was_down_comes_up_beside_an_array_that_cannot_be_let_go() {
    comes_up_beside(|daemon, cpu| {
        ["d2", "d3"].iter().for_each(|name| daemon.attach_new(name));
        daemon.ok("array create c --level 1 --drives d2,d3");
        daemon.ok("volume create w --array c --size 16M");
        daemon.ok("export create w --volume w");
        for _ in 0..TRIES {
            daemon.ok("array on-demand c");
            let its_cpu = daemon.json("array show c")["cpu"].as_u64();
            let halted = Halted::new(daemon, cpu)?;
            // Each look takes two seconds, and it goes after five; or it has gone before.
            if (0..4).all(|_| daemon.array_state("c") == "silent") {
                assert_eq!(its_cpu, Some(cpu));
                return Some(halted);
            }
            drop(halted);
            daemon.ok("array on-demand c --off");
            daemon.ok("array start c");
        }
        panic!("it is always let go at once");
    });
}

/// `hang`: has the reactor of a CPU hang.
fn comes_up_beside(hang: impl Fn(&Daemon, u64) -> Option<Halted>) {
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let cpus = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    let [first, second] = cpus.take(2).map(|cpu| cpu as u64).collect::<Vec<_>>()[..] else {
        return daemon::not_tried("one CPU has no second reactor");
    };
    let mut daemon = Daemon::with_array(1, 2);
    daemon.stop();
    daemon.start_again_with(&[&format!("--cores={first},{second}")]);
    daemon.ok("volume create v --array a --size 16M");
    let cpu = home(&daemon, "a");
    daemon.ok(&format!("export create e --volume v --path @/e.sock --cores {cpu}"));
    daemon.stop();
    let socket = daemon.path("e.sock");
    let taken = UnixListener::bind(&socket).unwrap();
    daemon.start_again();
    assert_eq!(home(&daemon, "a"), cpu);
    assert_eq!(daemon.json("export show e")["state"], "down");
    let Some(_halted) = hang(&daemon, first + second - cpu) else { return };
    drop(taken);
    std::fs::remove_file(socket).unwrap();
    daemon.wait_for("export show e", |export| export["state"] == "listening");
}

#[test]
fn drives_are_pulled_while_a_change_waits_for_them() {
    let daemon = Daemon::start();
    // It goes first, and thaws: else the daemon could not end.
    let Some(mut mounted) = Mounted::new(3 * DRIVE_BYTES) else { return };
    for name in ["d0", "d1"] {
        let file = mounted.place().join(name);
        File::create(&file).unwrap().set_len(DRIVE_BYTES).unwrap();
        daemon.ok(&format!("drive attach {} --name {name}", file.display()));
    }
    daemon.ok("array create a --level 1 --drives d0,d1");
    mounted.freeze();
    let change = daemon.run_beside(SOON_SECONDS, "volume create v --array a --size 8M");
    daemon.wait_for("drive show d0", |drive| drive["health"] == "suspect");
    let detach = |name| daemon.run_beside(SOON_SECONDS, &format!("drive detach {name} --force"));
    let (first, second) = (detach("d0"), detach("d1"));
    for (child, status) in [(change, 1), (first, 0), (second, 0)] {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{output:?}\n{}", daemon.log());
    }
    mounted.thaw();
    assert_eq!(daemon.json("array show a")["state"], "failed");
}
