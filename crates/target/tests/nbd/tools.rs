//! Clients that nobody here wrote: libnbd's tools, QEMU's, and fio with libnbd.

use std::path::Path;
use std::process::Command;

use ashlar_format::array_superblock::Level;
use ashlar_target::export::Export;

use crate::rig::Rig;
use crate::{Served, serve, soon};

const DATA: u64 = 64 << 20;

/// What the tool says, if it is content.
fn run(tool: &str, arguments: &[&str]) -> String {
    let output = Command::new("timeout").arg("60").arg(tool).args(arguments).output();
    let output = output.expect("coreutils are installed");
    assert!(output.status.code() != Some(127), "{tool} is missing: scripts/install.sh test");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let trouble = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{tool} {arguments:?}: {text}{trouble}");
    text
}

fn uri(served: &Served) -> String {
    format!("nbd+unix:///disk?socket={}", served.socket.display())
}

fn tcp(served: &Served) -> String {
    format!("nbd://{}/disk", served.export.address().unwrap())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn nbdinfo_reads_what_is_offered() {
    let rig = Rig::new(Level::Raid5, 4, DATA);
    let served = serve(&rig);
    for place in [uri(&served), tcp(&served)] {
        let told = run("nbdinfo", &["--json", &place]);
        for fact in [
            "\"protocol\": \"newstyle-fixed\"",
            "\"structured\": true",
            "\"export-name\": \"disk\"",
            "\"export-size\": 67108864",
            "\"is_read_only\": false",
            "\"can_cache\": true",
            "\"can_df\": true",
            "\"can_fast_zero\": true",
            "\"can_flush\": true",
            "\"can_fua\": true",
            "\"can_multi_conn\": true",
            "\"can_trim\": true",
            "\"can_zero\": true",
            "\"block_size_minimum\": 512",
            "\"block_size_preferred\": 4096",
            "\"block_size_maximum\": 33554432",
            "base:allocation",
        ] {
            assert!(told.contains(fact), "{fact}: {told}");
        }
    }
    assert!(run("nbdinfo", &["--list", &uri(&served)]).contains("export=\"disk\""));
}

/// Extents as `nbdinfo` has them: where, how long, and whether they hold data.
fn map(served: &Served) -> Vec<(u64, u64, bool)> {
    let text = run("nbdinfo", &["--map", &uri(served)]);
    let extent = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [at, len, kind, name] = words[..] else { panic!("{line}") };
        assert!(matches!((kind, name), ("0", "data") | ("3", "hole,zero")), "{line}");
        (at.parse().unwrap(), len.parse().unwrap(), name == "data")
    };
    text.lines().map(extent).collect()
}

#[test]
fn what_nobody_wrote_is_a_hole() {
    // Clients are served by both reactors in turn.
    let rig = Rig::spread(Level::Raid5, 4, DATA, std::time::Duration::ZERO);
    let served = serve(&rig);
    assert_eq!(map(&served), [(0, DATA, false)]);
    for command in ["write -P 1 20M 4k", "discard 0 64M"] {
        run("qemu-io", &["-f", "raw", "-c", command, &uri(&served)]);
        let map = map(&served);
        if command.starts_with("discard") {
            assert_eq!(map, [(0, DATA, false)]);
            continue;
        }
        let [before, data, after] = map[..] else { panic!("{map:?}") };
        assert!(before.0 == 0 && !before.2 && !after.2 && data.2, "{map:?}");
        assert!(data.0 <= 20 << 20 && (20 << 20) + 4096 <= data.0 + data.1, "{map:?}");
        assert_eq!((data.0, after.0 + after.1), (before.1, DATA));
    }
    drop(served);
    rig.withdraw_others();
}

#[test]
fn nbdcopy_brings_a_file_in_and_out() {
    let rig = Rig::spread(Level::Raid5, 4, DATA, std::time::Duration::from_micros(50));
    let served = serve(&rig);
    let scratch = tempfile::tempdir().unwrap();
    let (from, to) = (scratch.path().join("from"), scratch.path().join("to"));
    // With a long hole, that is sent as zeroes.
    let bytes: Vec<u8> = (0..DATA)
        .map(|at| if at >> 20 & 3 == 0 { 0 } else { (at.wrapping_mul(0x9e37_79b9) >> 13) as u8 })
        .collect();
    std::fs::write(&from, &bytes).unwrap();
    run("nbdcopy", &["--connections=4", "--flush", text(&from), &uri(&served)]);
    run("nbdcopy", &["--connections=4", &tcp(&served), text(&to)]);
    assert!(std::fs::read(&to).unwrap() == bytes);
    let counters = served.export.status().unwrap().counters;
    assert!(counters.flushes > 0 && counters.discards > 0, "{counters:?}");
    assert!(soon(|| served.serving() == [0, 0]));
    drop(served);
    rig.withdraw_others();
}

#[test]
fn qemu_reads_and_writes() {
    let rig = Rig::new(Level::Raid6, 5, DATA);
    let served = serve(&rig);
    let place = uri(&served);
    let commands = [
        "write -P 0x5a 0 64k",
        "write -f -P 0xa5 64k 4k",
        "write -z 8k 4k",
        "write -z -u 16k 4k",
        "discard 1M 1M",
        "flush",
        "read -P 0x5a 0 8k",
        "read -P 0 8k 4k",
        "read -P 0x5a 12k 4k",
        "read -P 0 16k 4k",
        "read -P 0xa5 64k 4k",
        // Less than a sector: QEMU knows what the server can do.
        "write -P 0x11 100 10",
        "read -P 0x11 100 10",
        "read -P 0x5a 110 400",
    ];
    let mut arguments = vec!["-f", "raw"];
    arguments.extend(commands.iter().flat_map(|command| ["-c", command]));
    arguments.push(&place);
    let said = run("qemu-io", &arguments);
    assert!(!said.contains("failed"), "{said}");
    let scratch = tempfile::tempdir().unwrap();
    let copy = scratch.path().join("copy");
    run("qemu-img", &["convert", "-f", "raw", "-O", "raw", &place, text(&copy)]);
    let same = run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &place, text(&copy)]);
    assert!(same.contains("identical"), "{same}");
}

#[test]
fn fio_finds_what_it_wrote() {
    let rig = Rig::new(Level::Raid5, 4, DATA);
    let served = serve(&rig);
    let place = format!("--uri={}", uri(&served));
    let arguments = [
        "--name=verify",
        "--ioengine=nbd",
        &place,
        "--rw=randwrite",
        "--bsrange=512-128k",
        "--size=32M",
        "--iodepth=32",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--fsync=16",
        "--randseed=1",
        "--verify_state_save=0",
        "--loops=2",
    ];
    run("fio", &arguments);
    assert!(served.export.status().unwrap().counters.flushes > 0);
}
