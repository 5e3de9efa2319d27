//! Goal: a file system that is full under the drives is said to be full, to the operator and to
//! whoever writes, and costs no drive; with room again all goes on.
//! Method: drive files without their blocks on a file system that a filler takes all of. Needs
//! root.
#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;
#[expect(dead_code, reason = "nothing is frozen here")]
#[path = "../../reactor/tests/mounted/mod.rs"]
mod mounted;

use std::fs::File;
use std::io::Write;
use std::process::{Command, Output};

use daemon::Daemon;
use mounted::Mounted;

const DRIVE_BYTES: u64 = 64 << 20;
const WRITTEN_BYTES: usize = 8 << 20;

fn copy(from: &str, to: &str) -> Output {
    Command::new("timeout").args(["60", "nbdcopy", from, to]).output().unwrap()
}

#[test]
fn a_full_file_system_is_told() {
    let daemon = Daemon::start();
    let Some(mounted) = Mounted::new(3 * DRIVE_BYTES) else { return };
    for name in ["d0", "d1"] {
        let file = mounted.place().join(name);
        File::create(&file).unwrap().set_len(DRIVE_BYTES).unwrap();
        daemon.ok(&format!("drive attach {} --name {name}", file.display()));
    }
    daemon.ok("array create a --level 1 --drives d0,d1");
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create n --volume v --kind nbd --path @/n.sock");
    let place = daemon.json("export show n")["place"].as_str().unwrap().to_owned();
    let from = daemon.path("from");
    std::fs::write(&from, vec![0x5a; WRITTEN_BYTES]).unwrap();
    let from = from.to_str().unwrap();

    let filler = mounted.place().join("filler");
    let mut file = File::create(&filler).unwrap();
    while file.write_all(&[1; 4096]).is_ok() {}
    drop(file);
    let output = copy(from, &place);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("No space left"), "{output:?}");
    let drive = daemon.wait_for("drive show d0", |drive| drive["full"] == true);
    assert!(drive["counters"]["no_space"].as_u64() > Some(0), "{drive}");
    assert_eq!(drive["health"], "healthy");
    assert!(daemon.ok("status").contains("! drive d0 had no room lately, "));

    std::fs::remove_file(&filler).unwrap();
    let output = copy(from, &place);
    assert!(output.status.success(), "{output:?}");
    let back = daemon.path("back");
    let output = copy(&place, back.to_str().unwrap());
    assert!(output.status.success(), "{output:?}");
    let read = std::fs::read(back).unwrap();
    assert!(read[..WRITTEN_BYTES].iter().all(|byte| *byte == 0x5a));
    daemon.wait_for("array show a", |array| array["state"] == "optimal");
    assert!(daemon.ok("array scrub a --wait").contains("all is well"));
}
