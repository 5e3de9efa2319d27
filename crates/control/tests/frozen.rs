//! Goal: an operator can end the wait for drives that do not answer, whatever else waits for them.
//! Method: drive files on a file system that is frozen. Needs root.
#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;
#[path = "../../reactor/tests/mounted/mod.rs"]
mod mounted;

use std::fs::File;

use daemon::Daemon;
use mounted::Mounted;

const DRIVE_BYTES: u64 = 64 << 20;
/// Less than such drives are waited for otherwise.
const SOON_SECONDS: u64 = 40;

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
