//! A file system that stops when the test says so.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

const FROZEN_SECONDS_MAX: u64 = 50;

fn run(program: &str, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).output().is_ok_and(|its| its.status.success())
}

/// A file system of its own, in a directory that goes with it.
pub struct Mounted {
    home: PathBuf,
    /// Thaws it once its input ends, however this process does; and where that is held up itself,
    /// in the kernel, after a while.
    watchdog: Option<Child>,
}

impl Mounted {
    /// `None`: nothing can be mounted here, which takes root.
    pub fn new(bytes: u64) -> Option<Mounted> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let own = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let home = std::env::temp_dir().join(format!("ashlar-mounted-{}-{}", own.0, own.1));
        let (image, place) = (home.join("image"), home.join("place"));
        std::fs::create_dir_all(&place).unwrap();
        File::create(&image).unwrap().set_len(bytes).unwrap();
        let image = image.to_str().unwrap();
        let made = run("mkfs.ext4", &["-q", "-F", image])
            && run("mount", &["-o", "loop", image, place.to_str().unwrap()]);
        if made {
            return Some(Mounted { home, watchdog: None });
        }
        let _ = std::fs::remove_dir_all(&home);
        let is_ci = std::env::var_os("ASHLAR_CI").is_some_and(|its| its == "1");
        assert!(!is_ci || !rustix::process::geteuid().is_root(), "nothing can be mounted");
        println!("not tried: nothing can be mounted here: it takes root");
        None
    }

    pub fn place(&self) -> PathBuf {
        self.home.join("place")
    }

    /// Whoever writes there waits from now on; not for ever.
    pub fn freeze(&mut self) {
        let place = self.place();
        let place = place.to_str().unwrap();
        let thaw = format!("read -t {FROZEN_SECONDS_MAX}; fsfreeze --unfreeze \"$0\"");
        let mut watchdog = Command::new("bash");
        let watchdog = watchdog.args(["-c", &thaw, place]).stdin(Stdio::piped());
        self.watchdog = Some(watchdog.spawn().unwrap());
        assert!(run("fsfreeze", &["--freeze", place]), "it is not frozen");
    }

    pub fn thaw(&mut self) {
        let Some(mut watchdog) = self.watchdog.take() else { return };
        drop(watchdog.stdin.take());
        watchdog.wait().unwrap();
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.thaw();
        run("umount", &["--lazy", self.place().to_str().unwrap()]);
        let _ = std::fs::remove_dir_all(&self.home);
    }
}
