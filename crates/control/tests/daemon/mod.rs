//! A daemon of its own for a test, driven through its command line only.
//!
//! Invariant: when the guard is dropped, the daemon and its files are gone.

#![allow(dead_code, clippy::unwrap_used, reason = "each test uses its part")]

use std::fmt::Display;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

const BINARY: &str = env!("CARGO_BIN_EXE_ashlar");
/// Bounds every command, in seconds.
const COMMAND_SECONDS_MAX: u64 = 60;
/// Bounds waiting, which is for nothing that takes longer. On a machine that is busy there are so
/// many looks all the same.
const WAIT_SECONDS_MAX: u64 = 40;
const LOOKS_MIN: u32 = 2000;
/// Bounds waiting until a refused command's client is gone for the daemon, too.
const GONE_LOOKS_MAX: u32 = 500;
pub const DRIVE_BYTES: u64 = 64 << 20;

/// A test is not tried, since the machine has not what it takes. Where everything has to be tried
/// (`ASHLAR_CI=1`, by root) that is a failure.
pub fn not_tried(why: &str) {
    let is_ci = std::env::var_os("ASHLAR_CI").is_some_and(|its| its == "1");
    assert!(!is_ci || !rustix::process::geteuid().is_root(), "not tried: {why}");
    println!("not tried: {why}");
}

/// Ends the daemon when dropped.
pub struct Process(Child);

impl Process {
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = i32::try_from(self.0.id()).unwrap();
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        // It may have ended by itself.
        let _ = rustix::process::kill_process(pid, signal);
    }

    /// A file that the kernel has about it.
    fn proc(&self, file: &str) -> PathBuf {
        format!("/proc/{}/{file}", self.0.id()).into()
    }

    /// The exit status, once it has ended.
    pub fn wait(&mut self) -> Option<i32> {
        self.0.wait().unwrap().code()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(rustix::process::Signal::KILL);
        let _ = self.0.wait();
    }
}

pub struct Daemon {
    directory: TempDir,
    /// Name of the state directory.
    state: String,
    /// Another host than this one, if it shall say so.
    host: Option<u8>,
    /// The network namespace that it is in, if not that of the test.
    network: Option<String>,
    /// More words of its command.
    options: Vec<String>,
    process: Option<Process>,
}

impl Daemon {
    pub fn start() -> Daemon {
        let directory = tempfile::Builder::new().prefix("ashlar-").tempdir().unwrap();
        let (state, options) = ("state".into(), Vec::new());
        let (host, network, process) = (None, None, None);
        let mut daemon = Daemon { directory, state, host, network, options, process };
        daemon.start_again();
        daemon
    }

    /// The same as another host in a network namespace.
    pub fn start_in(network: &str, host: u8, options: &[&str]) -> Daemon {
        Daemon::start_as(Some(network), host, options)
    }

    /// The same, in the network of the test.
    pub fn start_beside(host: u8, options: &[&str]) -> Daemon {
        Daemon::start_as(None, host, options)
    }

    fn start_as(network: Option<&str>, host: u8, options: &[&str]) -> Daemon {
        let directory = tempfile::Builder::new().prefix("ashlar-").tempdir().unwrap();
        let options = options.iter().map(|&option| option.to_owned()).collect();
        let (state, network, process) = ("state".into(), network.map(str::to_owned), None);
        let mut daemon = Daemon { directory, state, host: Some(host), network, options, process };
        daemon.start_again();
        daemon
    }

    /// A daemon with drives `d0`, `d1`, … of the smallest size.
    pub fn with_drives(count: usize) -> Daemon {
        let daemon = Daemon::start();
        (0..count).for_each(|number| daemon.attach_new(&format!("d{number}")));
        daemon
    }

    /// A daemon with array `a` of this level on drives `d0`, `d1`, …
    pub fn with_array(level: impl Display, members: usize) -> Daemon {
        let daemon = Daemon::with_drives(members);
        daemon.create_array("a", level, members);
        daemon
    }

    pub fn attach_new(&self, name: &str) {
        self.make_drive(name);
        self.ok(&format!("drive attach @/{name}.img"));
    }

    pub fn create_array(&self, name: &str, level: impl Display, members: usize) {
        let drives: Vec<String> = (0..members).map(|number| format!("d{number}")).collect();
        self.ok(&format!("array create {name} --level {level} --drives {}", drives.join(",")));
    }

    /// A sparse file of zeroes.
    pub fn make_drive(&self, name: &str) -> PathBuf {
        let path = self.path(&format!("{name}.img"));
        File::create(&path).unwrap().set_len(DRIVE_BYTES).unwrap();
        path
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn serve(&self, state: &str, socket: &str) -> Process {
        let log = File::options().create(true).append(true).open(self.path("log")).unwrap();
        // The daemon is exec'd by nothing else, so its id is the child's.
        let mut command = match &self.network {
            None => Command::new(BINARY),
            Some(network) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", network, BINARY]);
                command
            }
        };
        let process = command
            .args(["serve", "--state"])
            .arg(self.path(state))
            .arg("--socket")
            .arg(self.path(socket))
            .args(self.host.map(|host| format!("--host-id=00000000-0000-0000-0000-{host:012}")))
            .args(&self.options)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        Process(process.unwrap())
    }

    pub fn start_again(&mut self) {
        assert!(self.process.is_none(), "it runs");
        self.process = Some(self.serve(&self.state.clone(), "api.sock"));
        self.ok("status --wait-up 55");
    }

    /// The same, told more on its command line from now on.
    pub fn start_again_with(&mut self, options: &[&str]) {
        self.options = options.iter().map(|&option| option.to_owned()).collect();
        self.start_again();
    }

    /// Starts on another host that reaches the same drives.
    pub fn start_on_host(&mut self, host: u8) {
        self.host = Some(host);
        self.start_without_state();
    }

    /// Starts on the first host again, which remembers what was.
    pub fn start_on_first_host(&mut self) {
        self.host = None;
        self.state = "state".into();
        self.start_again();
    }

    /// Starts again as if on a host that has never seen these drives.
    pub fn start_without_state(&mut self) {
        self.state.push_str("-new");
        self.start_again();
    }

    /// SIGTERM; the daemon must drain and end with status 0.
    pub fn stop(&mut self) {
        let mut process = self.process.take().unwrap();
        process.signal(rustix::process::Signal::TERM);
        assert_eq!(process.wait(), Some(0), "{}", self.log());
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        drop(self.process.take().unwrap());
    }

    /// A file that the kernel has about the daemon.
    pub fn proc(&self, file: &str) -> PathBuf {
        self.process.as_ref().unwrap().proc(file)
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Runs `ashlar` with these words; `@/` begins a path in the daemon's directory.
    pub fn run(&self, line: &str) -> Output {
        self.command(COMMAND_SECONDS_MAX, line).output().unwrap()
    }

    /// The same; what it prints goes to `output`.
    pub fn run_into(&self, output: impl Into<Stdio>, line: &str) -> Output {
        let mut command = self.command(COMMAND_SECONDS_MAX, line);
        let child = command.stdout(output).stderr(Stdio::piped()).spawn();
        child.unwrap().wait_with_output().unwrap()
    }

    /// The same beside the test, for `seconds` at most.
    pub fn run_beside(&self, seconds: u64, line: &str) -> Child {
        let mut command = self.command(seconds, line);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn command(&self, seconds: u64, line: &str) -> Command {
        let directory = format!("{}/", self.directory.path().display());
        let words = line.split_whitespace().map(|word| word.replace("@/", &directory));
        let mut command = Command::new("timeout");
        command.args([&seconds.to_string(), BINARY]).args(words);
        command.env("ASHLAR_SOCKET", self.path("api.sock")).stdin(Stdio::null());
        command
    }

    /// What a command that must succeed printed.
    pub fn ok(&self, line: &str) -> String {
        let output = self.run(line);
        let (stdout, stderr) = texts(&output);
        let log = if output.status.success() { String::new() } else { self.log() };
        assert_eq!(output.status.code(), Some(0), "{line}: {stderr}{stdout}\n{log}");
        stdout
    }

    /// What a command that must succeed says in JSON.
    pub fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.ok(&format!("{line} -o json"))).unwrap()
    }

    /// What a command that must be refused said; nothing may have changed.
    pub fn refused(&self, line: &str) -> String {
        self.try_refused(line)
            .unwrap_or_else(|changed| panic!("{line} changed something: {changed}"))
    }

    /// The same. An error: something has changed, perhaps by itself.
    pub fn try_refused(&self, line: &str) -> Result<String, String> {
        let before = self.everything();
        let output = self.run(line);
        let (stdout, stderr) = texts(&output);
        assert_eq!(output.status.code(), Some(1), "{line}: {stderr}{stdout}");
        assert!(stderr.starts_with("error: "), "{line}: {stderr}");
        // The daemon notices a moment later than others that a client is gone.
        let mut after = self.everything();
        for _ in 0..GONE_LOOKS_MAX {
            if after == before {
                break;
            }
            after = self.everything();
        }
        if after == before {
            return Ok(stderr);
        }
        Err(format!("{stderr}\nbefore: {before:?}\nafter: {after:?}"))
    }

    /// A command that is not understood: status 2.
    pub fn misused(&self, line: &str) -> String {
        let output = self.run(line);
        let (_, stderr) = texts(&output);
        assert_eq!(output.status.code(), Some(2), "{line}: {stderr}");
        stderr
    }

    /// Waits until array `a` has all its members, and sees that they agree.
    pub fn is_whole(&self) {
        self.wait_for("array show a", |array| array["state"] == "optimal");
        self.ok("array scrub a --wait");
        let scrub = &self.json("array show a")["scrub"];
        assert_eq!(scrub["mismatched_stripes"], 0, "{scrub}");
    }

    pub fn array_state(&self, name: &str) -> String {
        self.json(&format!("array show {name}"))["state"].as_str().unwrap().to_owned()
    }

    /// Asks again until the answer satisfies, and returns it; not without end.
    #[expect(clippy::disallowed_methods, reason = "a test's own clock")]
    pub fn wait_for(&self, line: &str, satisfies: impl Fn(&Value) -> bool) -> Value {
        let (began, mut looks) = (std::time::Instant::now(), 0);
        while looks < LOOKS_MIN || began.elapsed().as_secs() < WAIT_SECONDS_MAX {
            looks += 1;
            let answer = self.json(line);
            if satisfies(&answer) {
                return answer;
            }
        }
        panic!("{line}: {}\n{}", self.json(line), self.log());
    }

    /// Waits until the daemon has noticed that an export's clients are gone.
    pub fn wait_unused(&self, export: &str) {
        self.wait_for(&format!("export show {export}"), |its| its["state"] == "listening");
    }

    /// The catalog, the status and the files, without what changes by itself.
    fn everything(&self) -> (Value, Value, Vec<(PathBuf, u64)>) {
        let catalog = std::fs::read(self.path(&self.state).join("catalog.json"));
        let mut catalog = serde_json::from_slice(&catalog.unwrap_or_default()).unwrap_or_default();
        without_what_moves(&mut catalog);
        let mut status = self.json("status");
        without_what_moves(&mut status);
        let mut files: Vec<_> = std::fs::read_dir(self.directory.path())
            .unwrap()
            .map(|entry| entry.unwrap())
            .filter(|entry| entry.file_name() != "log")
            .map(|entry| (entry.path(), entry.metadata().unwrap().len()))
            .collect();
        files.sort();
        (catalog, status, files)
    }
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

fn without_what_moves(value: &mut Value) {
    const MOVING: [&str; 16] = [
        "uptime_s",
        "counters",
        // Rates and mean depth fall while nothing is asked; what is pending is put in place.
        "traffic",
        "journal",
        "latency",
        "queue",
        "memory",
        "slow",
        "slowness",
        "history",
        "dirty_regions",
        "resync",
        "rebuild",
        "scrub",
        // The watch notes these a moment later than they change.
        "generation",
        "current",
    ];
    match value {
        Value::Object(fields) => {
            MOVING.iter().for_each(|field| drop(fields.remove(*field)));
            fields.values_mut().for_each(without_what_moves);
        }
        Value::Array(values) => values.iter_mut().for_each(without_what_moves),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
