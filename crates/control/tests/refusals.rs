//! Goal: bad input gets a clear message and status 1 (misuse: 2), and changes nothing.
//! Method: every kind of bad input in turn; `refused` compares all state before and after.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

mod daemon;

use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixListener;

use ashlar_format::record::MAGIC;
use ashlar_raid::label::plan;
use daemon::{DRIVE_BYTES, Daemon};
use serde_json::Value;

#[test]
fn unknown_names() {
    let daemon = Daemon::with_array(1, 2);
    for line in [
        "drive show x",
        "drive detach x",
        "array show x",
        "array stop x",
        "array start x",
        "array delete x",
        "array rebuild x",
        "array scrub x",
        "array set x --policy none",
        "array replace x --member 0 --new d0",
        "array replace a --member 0 --new x --force",
        "array replace a --old x --new d0",
        "array replace a --member 9 --new d0",
        "array create b --level 1 --drives x,y",
        "volume show x",
        "volume delete x",
        "volume resize x --size 1G",
        "volume create v --array x --size 1G",
        "volume show a/x",
        "volume show x/y",
        "export show x",
        "export create e --volume x",
        "drive show ../../status",
    ] {
        let said = daemon.refused(line);
        assert!(said.contains("no "), "{line}: {said}");
        assert!(said.contains("\nfix: "), "{line}: {said}");
    }
}

#[test]
fn programs_read_refusals_as_json() {
    let daemon = Daemon::start();
    let output = daemon.run("array show x -o json");
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));
    let said: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert!(said["error"].as_str().unwrap().contains("no array"), "{said}");
    assert!(said["fix"].as_str().unwrap().contains("ashlar array list"), "{said}");
}

#[test]
fn names_that_cannot_be() {
    let daemon = Daemon::with_array(1, 2);
    daemon.make_drive("x");
    daemon.ok("volume create v --array a --size 16M");
    let long = "n".repeat(64);
    for name in ["a/b", "ä", ".x", "a:b", &long] {
        daemon.refused(&format!("drive attach @/x.img --name {name}"));
        daemon.refused(&format!("volume create {name} --array a --size 1M"));
        daemon.refused(&format!("export create {name} --volume v"));
        daemon.refused(&format!("array create {name} --level 0 --drives d0"));
    }
}

#[test]
fn misuse_is_status_two() {
    let daemon = Daemon::start();
    for line in [
        "",
        "frobnicate",
        "drive",
        "drive attach",
        "array create a --level 5",
        "array create a --drives d0,d1",
        "array create a --level 5 --drives d0,d1,d2 --policy maybe",
        "array set a --policy",
        "array set a --rebuild-share 0",
        "array set a --rebuild-share 101",
        "array set a --hedge 101",
        "array set a --scrub-every 0",
        "array set a --spare-delay soon",
        "array create a --level five --drives d0",
        "array create a --level 4+ --drives d0",
        "array create a --level 50 --group-size two --drives d0",
        "array start",
        "array start a --scan",
        "array replace a --new d0",
        "array replace a --member 0 --old d0 --new d1",
        "volume create v --array a",
        "volume create v --array a --size 10X",
        "volume create v --array a --size -1",
        "status --frob",
        "-o yaml status",
        "serve --cores nine",
    ] {
        daemon.misused(line);
    }
}

#[test]
fn arrays_that_cannot_be() {
    let daemon = Daemon::with_drives(5);
    daemon.ok("array create a --level 1 --drives d3,d4");
    for (line, what) in [
        ("array create b --level 5 --drives d0,d1", "at least 3"),
        ("array create b --level 6 --drives d0,d1,d2", "at least 4"),
        ("array create b --level 1 --drives d0", "at least 2"),
        ("array create b --level 10 --drives d0,d1,d2", "at least 4"),
        ("array create b --level 4 --drives d0,d1,d2", "RAID level 4"),
        ("array create b --level 7 --drives d0,d1,d2", "7.3"),
        ("array create b --level 2+9 --drives d0,d1,d2", "RAID level 2+9"),
        ("array create b --level 0+1 --drives d0", "RAID level 0+1"),
        ("array create b --level 10+4 --drives d0,d1,d2", "needs 14 drives, not 3"),
        ("array create b --level 7.3 --drives d0,d1,d2", "at least 5"),
        ("array create b --level 50 --drives d0,d1,d2", "at least 6"),
        ("array create b --level 50 --drives d0,d1,d2 --group-size 2", "at least 6"),
        ("array create b --level 5 --drives d0,d1,d2 --group-size 3", "groups"),
        ("array create b --level 0 --drives d0,d1,d2 --policy journal", "policy is none"),
        ("array create b --level 5 --drives d0,d1,d2 --atomic 2K", "4K to 256K"),
        ("array create b --level 5 --drives d0,d1,d2 --scrub-every 1s", "1 hour to 3650 days"),
        ("array create b --level 5 --drives d0,d1,d0", "named twice"),
        ("array set a --atomic 257K", "4K to 256K"),
        ("array set a --spare-delay 4000d", "0 s to 3650 days"),
        ("array create b --level 5 --drives d0,d1,d3", "in use"),
        ("array create a --level 5 --drives d0,d1,d2", "already"),
        ("array create b --level 5 --drives d0,d1,d2 --chunk 8K", "chunk"),
        ("array create b --level 5 --drives d0,d1,d2 --chunk 2M", "chunk"),
        ("array create b --level 5 --drives d0,d1,d2 --chunk 48K", "chunk"),
        ("array create b --level 5 --drives d0,d1,d2 --chunk 8G", "chunk"),
        ("array create b --level 5 --drives d0,d1,d2 --copies 2", "copies"),
        ("array create b --level 10 --drives d0,d1,d2 --copies 2", ""),
        ("array scrub a --stop", "no scrub is running"),
        ("array start a", "runs already"),
    ] {
        let said = daemon.refused(line);
        assert!(said.contains(what), "{line}: {said}");
    }
    // After all that, the drives are as good as new.
    daemon.ok("array create b --level 5 --drives d0,d1,d2");
}

#[test]
fn volumes_that_cannot_be() {
    let daemon = Daemon::with_array(5, 3);
    daemon.ok("volume create v --array a --size 32M");
    for (line, what) in [
        ("volume create v --array a --size 1M", "already"),
        ("volume create w --array a --size 1T", "free"),
        ("volume create w --array a --size 0", "multiple of 512"),
        ("volume create w --array a --size 1000", "multiple of 512"),
        ("volume resize v --size 16M", "only grow"),
        ("volume resize v --size 1T", "free"),
        ("array delete a", "holds volumes"),
    ] {
        let said = daemon.refused(line);
        assert!(said.contains(what), "{line}: {said}");
        assert!(said.contains("\nfix: "), "{line}: {said}");
    }
    // A full array is full, and says so.
    let free = daemon.json("array show a")["free_bytes"].as_u64().unwrap();
    daemon.ok(&format!("volume create rest --array a --size {free}"));
    assert!(daemon.refused("volume create w --array a --size 512").contains("0B free"));
    daemon.ok("volume delete rest");
    daemon.ok("volume create w --array a --size 512");
}

#[test]
fn drives_that_carry_data() {
    let daemon = Daemon::start();
    let signs: [(&str, u64, &[u8]); 6] = [
        ("ext4", 1080, b"\x53\xef"),
        ("gpt", 512, b"EFI PART"),
        ("xfs", 0, b"XFSB"),
        ("lvm", 512, b"LABELONE"),
        ("md", 4096, b"\xfc\x4e\x2b\xa9"),
        ("data", 300_000, b"precious"),
    ];
    for (name, offset, bytes) in signs {
        let path = daemon.make_drive(name);
        File::options().write(true).open(&path).unwrap().write_all_at(bytes, offset).unwrap();
        let said = daemon.refused(&format!("drive attach @/{name}.img"));
        assert!(said.contains("carries data"), "{name}: {said}");
        assert!(said.contains("--force"), "{name}: {said}");
        let mut now = vec![0; bytes.len()];
        File::open(&path).unwrap().read_exact_at(&mut now, offset).unwrap();
        assert_eq!(now, bytes, "{name} was touched");
    }
    // With consent it is taken, and an array may use it.
    daemon.ok("drive attach @/ext4.img --force");
    daemon.ok("drive attach @/xfs.img --force");
    daemon.ok("array create a --level 1 --drives ext4,xfs");
    assert_eq!(daemon.json("drive show ext4")["content"], "member 0 of array a");
}

#[test]
fn what_cannot_be_a_drive() {
    let daemon = Daemon::with_drives(1);
    daemon.make_drive("read-only");
    std::fs::set_permissions(daemon.path("read-only.img"), Permissions::from_mode(0o444)).unwrap();
    File::create(daemon.path("small.img")).unwrap().set_len(1 << 20).unwrap();
    std::os::unix::fs::symlink(daemon.path("d0.img"), daemon.path("link.img")).unwrap();
    std::fs::hard_link(daemon.path("d0.img"), daemon.path("hard.img")).unwrap();
    daemon.make_drive("other");
    for (line, what) in [
        ("drive attach @/missing.img", "does not exist"),
        ("drive attach @/no/such.img --size 64M", "directory"),
        ("drive attach @/read-only.img", "read-only"),
        ("drive attach @/small.img", "too little"),
        ("drive attach @/", "neither a file nor"),
        ("drive attach /dev/null", "neither a file nor"),
        ("drive attach @/d0.img", "attached already"),
        ("drive attach @/d0.img --name twice", "attached already, as drive d0"),
        ("drive attach @/link.img", "attached already, as drive d0"),
        ("drive attach @/hard.img", "attached already, as drive d0"),
        ("drive attach @/other.img --name d0", "already"),
        ("drive attach @/other.img --size 128M", "not 128M"),
        ("drive attach @/new.img --size 1M", "no size"),
        ("drive attach @/new.img --size 100000001", "no size"),
        ("drive attach @/new.img --size 8E", "no room"),
    ] {
        let said = daemon.refused(line);
        assert!(said.contains(what), "{line}: {said}");
    }
}

#[test]
fn scribbled_and_truncated_labels() {
    let mut daemon = Daemon::with_array(5, 4);
    daemon.ok("volume create v --array a --size 16M");
    daemon.stop();
    let directory = daemon.path("");
    let open = |name: &str| File::options().write(true).open(directory.join(name)).unwrap();
    // One copy of the label, and both superblocks: others stand for them.
    open("d0.img").write_all_at(&[0x5a; 4096], 0).unwrap();
    let superblocks = plan(DRIVE_BYTES, 1).unwrap().superblocks;
    let scribble = vec![0x5a; superblocks.len as usize];
    open("d0.img").write_all_at(&scribble, superblocks.offset).unwrap();
    // It is healed at the next start.
    assert!(daemon.ok("inspect @/d0.img").contains("no Ashlar record"));
    // All copies.
    for offset in [100, 4196, DRIVE_BYTES - 4000] {
        open("d1.img").write_all_at(b"scribble", offset).unwrap();
    }
    daemon.start_again();
    assert_eq!(daemon.array_state("a"), "degraded");
    assert_eq!(daemon.json("array show a")["members"][0]["state"], "trusted");
    let mut healed = scribble;
    let d0 = File::open(directory.join("d0.img")).unwrap();
    for area in [0..4096, superblocks.range()] {
        let bytes = &mut healed[..(area.end - area.start) as usize];
        d0.read_exact_at(bytes, area.start).unwrap();
        assert!(bytes.chunks(4096).any(|block| block.starts_with(&MAGIC)), "{area:?}");
    }
    let missing = daemon.json("drive show d1");
    assert_eq!(missing["state"], "missing");
    assert!(missing["error"].as_str().unwrap().contains("damaged Ashlar label"), "{missing}");
    let output = daemon.run("inspect @/d1.img");
    assert_eq!(output.status.code(), Some(1));
    assert!(daemon.refused("drive attach @/d1.img").contains("damaged Ashlar label"));
    // It is taken by force, as an empty one, and rebuilt.
    daemon.ok("drive attach @/d1.img --force");
    daemon.ok("array replace a --member 1 --new d1 --wait");
    assert_eq!(daemon.array_state("a"), "optimal");

    // A drive that was cut short, though it is still large enough for a drive.
    File::create(directory.join("big.img")).unwrap().set_len(2 * DRIVE_BYTES).unwrap();
    daemon.ok("drive attach @/big.img");
    daemon.ok("array replace a --member 2 --new big --force --wait");
    daemon.ok("drive detach big --force");
    open("big.img").set_len(DRIVE_BYTES).unwrap();
    // That is noted: it is not believed when it has its size again.
    assert_eq!(daemon.run("drive attach @/big.img").status.code(), Some(1));
    let said = daemon.refused("drive attach @/big.img");
    assert!(said.contains("was cut short: its label speaks of"), "{said}");
    open("big.img").set_len(2 * DRIVE_BYTES).unwrap();
    let said = daemon.refused("drive attach @/big.img");
    assert!(said.contains("was cut short"), "{said}");
}

#[test]
fn a_file_that_shrinks_in_use_is_pulled() {
    let mut daemon = Daemon::with_array(5, 4);
    daemon.ok("volume create v --array a --size 16M");
    let file = File::options().write(true).open(daemon.path("d3.img")).unwrap();
    let cut = |bytes| file.set_len(bytes).unwrap();
    cut(8 << 20);
    // The watch looks about once a second.
    daemon.wait_for("array show a", |array| array["state"] == "degraded");
    assert!(daemon.log().contains("cut short"), "{}", daemon.log());
    daemon.ok("volume show v");
    // Its size alone does not make it what it was: not here,
    cut(DRIVE_BYTES);
    let said = daemon.refused("array rebuild a");
    assert!(said.contains("was cut short"), "{said}");
    // nor at a start of the array,
    daemon.ok("array stop a");
    daemon.ok("array start a");
    assert_eq!(daemon.array_state("a"), "degraded");
    for force in ["", "--force"] {
        let said = daemon.refused(&format!("array replace a --member 3 --new d3 {force}"));
        assert!(said.contains("was cut short"), "{said}");
    }
    // nor of the daemon.
    daemon.kill();
    daemon.start_again();
    assert_eq!(daemon.array_state("a"), "degraded");
    assert!(daemon.json("drive show d3")["error"].as_str().unwrap().contains("was cut short"));
    assert!(daemon.refused("drive attach @/d3.img").contains("was cut short"));
    daemon.ok("drive attach @/d3.img --force");
    daemon.ok("array replace a --member 3 --new d3 --wait");
    assert_eq!(daemon.array_state("a"), "optimal");
}

#[test]
fn a_file_that_is_deleted_in_use_is_told() {
    let daemon = Daemon::with_array(1, 2);
    std::fs::remove_file(daemon.path("d1.img")).unwrap();
    let told = |status: &Value| status["problems"].to_string().contains("d1: its file was deleted");
    daemon.wait_for("status", told);
    assert_eq!(daemon.json("drive show d1")["deleted"], true);
    // Nothing is lost yet.
    daemon.attach_new("d2");
    daemon.ok("array replace a --old d1 --new d2 --force --wait");
    daemon.ok("drive detach d1");
    daemon.wait_for("status", |status| !told(status));
    assert_eq!(daemon.array_state("a"), "optimal");
}

/// Also one that is too small for a drive by then.
#[test]
fn a_file_that_was_cut_short_while_nobody_looked() {
    for bytes in [4096, 512 << 10, 1 << 20, DRIVE_BYTES] {
        let mut daemon = Daemon::start();
        for drive in ["d0", "d1"] {
            daemon.ok(&format!("drive attach @/{drive}.img --size {}", 2 * DRIVE_BYTES));
        }
        daemon.ok("array create a --level 1 --drives d0,d1");
        daemon.kill();
        let file = File::options().write(true).open(daemon.path("d1.img")).unwrap();
        file.set_len(bytes).unwrap();
        daemon.start_again();
        let error = daemon.json("drive show d1")["error"].to_string();
        assert!(error.contains("was cut short: its label speaks of"), "{error}");
        // Half a copy of the other says nothing of that.
        std::fs::copy(daemon.path("d0.img"), daemon.path("copy.img")).unwrap();
        let copy = File::options().write(true).open(daemon.path("copy.img")).unwrap();
        copy.set_len(bytes).unwrap();
        assert!(daemon.refused("drive attach @/copy.img").contains("copy of drive d0"));
        daemon.kill();
        file.set_len(2 * DRIVE_BYTES).unwrap();
        daemon.start_again();
        assert_eq!(daemon.array_state("a"), "degraded");
        assert!(daemon.refused("drive attach @/d1.img").contains("was cut short"));
        // Somebody knows better.
        daemon.ok("drive attach @/d1.img --whole");
        daemon.wait_for("array show a", |array| array["state"] == "optimal");
        daemon.kill();
        daemon.start_again();
        assert_eq!(daemon.array_state("a"), "optimal");
    }
}

#[test]
fn copies_of_a_drive_are_not_taken_for_it() {
    let daemon = Daemon::with_array(1, 2);
    std::fs::copy(daemon.path("d0.img"), daemon.path("copy.img")).unwrap();
    let said = daemon.refused("drive attach @/copy.img");
    assert!(said.contains("copy of drive d0"), "{said}");
}

#[test]
fn sockets_that_are_busy() {
    let daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 16M");
    let _listener = UnixListener::bind(daemon.path("busy.sock")).unwrap();
    let said = daemon.refused("export create e --volume v --path @/busy.sock");
    assert!(said.contains("busy") || said.contains("in use"), "{said}");
    std::fs::write(daemon.path("file"), "precious").unwrap();
    let said = daemon.refused("export create e --volume v --path @/file");
    assert!(said.contains("socket"), "{said}");
    assert_eq!(std::fs::read(daemon.path("file")).unwrap(), b"precious");
    let long = "s".repeat(120);
    daemon.refused(&format!("export create e --volume v --path @/{long}"));
}

#[test]
fn a_second_daemon_is_refused() {
    let daemon = Daemon::with_drives(1);
    let mut same_state = daemon.serve("state", "other.sock");
    assert_eq!(same_state.wait(), Some(1));
    let mut same_socket = daemon.serve("other-state", "api.sock");
    assert_eq!(same_socket.wait(), Some(1));
    assert!(daemon.log().is_empty() || !daemon.log().contains("panicked"));
    // A drive belongs to one daemon.
    let other = Daemon::start();
    let path = daemon.path("d0.img");
    let said = other.refused(&format!("drive attach {}", path.display()));
    assert!(said.contains("held by another process"), "{said}");
    daemon.ok("drive detach d0");
    other.ok(&format!("drive attach {}", path.display()));
}

#[test]
fn a_full_state_directory_refuses_changes() {
    let daemon = Daemon::with_drives(3);
    // A directory where the new catalog would be written stands for a disk that refuses it.
    std::fs::create_dir(daemon.path("state/catalog.json.new")).unwrap();
    // The first that is refused is what tells of it; nothing else changes then.
    assert!(!daemon.run("drive detach d0").status.success());
    assert!(daemon.json("status")["problems"].to_string().contains("catalog"));
    for line in [
        "array create a --level 5 --drives d0,d1,d2",
        "drive attach @/new.img --size 64M",
        "drive detach d0",
    ] {
        assert!(daemon.refused(line).contains("catalog"), "{line}");
    }
    std::fs::remove_dir(daemon.path("state/catalog.json.new")).unwrap();
    daemon.ok("array create a --level 5 --drives d0,d1,d2");
    assert_eq!(daemon.json("status")["problems"], serde_json::json!([]));
    // Guests may wait for a drive that hangs: it is pulled all the same, and that is said.
    std::fs::create_dir(daemon.path("state/catalog.json.new")).unwrap();
    let output = daemon.run("drive detach d0 --force");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("was pulled, and not detached"), "{said}");
    daemon.wait_for("array show a", |array| array["state"] == "degraded");
    std::fs::remove_dir(daemon.path("state/catalog.json.new")).unwrap();
    daemon.ok("drive detach d0 --force");
}

#[test]
fn output_that_cannot_be_written_is_no_success() {
    let daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v");
    for line in [
        "metrics",
        "status",
        "-o json status",
        "drive list",
        "array show a",
        "export show e --qemu",
        "top --count 1",
        "inspect @/d0.img",
        "gen-secret",
        "openapi",
        "completions bash",
    ] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = daemon.run_into(full, line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{line}: {said}");
        let why = "the output could not be written: No space left on device";
        assert!(said.contains(why), "{line}: {said}");
    }
    // Who has read enough goes away.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = daemon.run_into(writer, "status");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn without_a_daemon() {
    let mut daemon = Daemon::start();
    daemon.stop();
    let output = daemon.run("drive list");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("no daemon listens") && said.contains("ashlar serve"), "{said}");
}
