//! Goal: an operator, and Prometheus, see what is asked of arrays and exports, and what that costs.
//! Method: requests over an export's socket; counters, rates, times and depth in every form.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use daemon::Daemon;
use serde_json::Value;

const REQUESTS: u64 = 2000;
/// "Lately" is the last five seconds: on a machine that is busy, a look may come later than that.
const TRIES: u32 = 10;
const BENCH: &str = "bench vhost --socket @/e.sock --size 4M --depth 8 --force";

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

/// What `look` sees just after requests, if not after the first ones.
fn just_after_requests<T>(daemon: &Daemon, look: impl Fn() -> Option<T>) -> T {
    let found = (0..TRIES).find_map(|number| {
        if number > 0 {
            daemon.ok(&format!("{BENCH} --rw randrw --ios {REQUESTS} --rounds 1"));
        }
        look()
    });
    found.expect("what was lately is not known")
}

/// A daemon with array `a` and export `e`, which was asked for reads and writes of 4 KiB.
fn busy_daemon(policy: &str) -> Daemon {
    let daemon = Daemon::with_drives(3);
    let create = "array create a --level 5 --drives d0,d1,d2";
    daemon.ok(&format!("{create} --policy {policy}"));
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v --path @/e.sock");
    // Blocks that were never written cost no drive's work, so all are, before.
    daemon.ok(&format!("{BENCH} --fill --rw randrw --ios {REQUESTS} --rounds 1"));
    daemon
}

#[test]
fn requests_are_counted_timed_and_shown() {
    let daemon = busy_daemon("bitmap");
    let (export, shown) = just_after_requests(&daemon, || {
        let shown = daemon.ok("export show e");
        let export = daemon.json("export show e");
        let rate = |kind: &str| number(&export["traffic"][kind]["per_second"]);
        let is_lately = rate("reads") > 0 && rate("writes") > 0 && shown.contains("p99.9");
        is_lately.then_some((export, shown))
    });
    let traffic = &export["traffic"];
    let (reads, writes) = (&traffic["reads"], &traffic["writes"]);
    let all = number(&reads["total"]) + number(&writes["total"]);
    assert!(all >= REQUESTS, "{traffic}");
    assert_eq!(reads["total"], export["counters"]["reads"]);
    assert_eq!(number(&reads["bytes"]), 4096 * number(&reads["total"]));
    [reads, writes].into_iter().for_each(agrees_with_itself);
    assert_eq!(number(&traffic["depth"]), 0);
    let most = number(&traffic["depth_max"]);
    assert!((1..=8).contains(&most), "{traffic}");
    assert!(number(&traffic["depth_mean_milli"]) <= 8000, "{traffic}");

    let array = daemon.json("array show a");
    assert_eq!(array["traffic"]["reads"]["total"], reads["total"]);
    assert_eq!(array["counters"]["writes"], writes["total"]);
    // Small writes of three members: what was there and its parity, or the other chunk alone.
    let updates = &array["counters"]["updates"];
    let kinds = ["read_modify_write", "reconstruct_write", "whole_stripe"];
    let stored: u64 = kinds.iter().map(|kind| number(&updates[kind])).sum();
    assert_eq!(stored, number(&writes["total"]), "{updates}");
    assert_eq!(array["counters"]["journaled"], 0);
    let drive = daemon.json("drive show d0");
    assert_eq!(drive["traffic"]["reads"]["total"], drive["counters"]["reads"]);

    for word in ["read      ", "p99.9", "max", "lately", "depth     0 now"] {
        assert!(shown.contains(word), "{word}: {shown}");
    }
    let shown = daemon.ok("array show a");
    assert!(shown.contains("stored      in place 100 % reconstruct-write"), "{shown}");
    assert!(daemon.ok("drive show d0").contains("reads/s ("));

    let look = daemon.json("top --count 1");
    assert_eq!(look["cores"][0]["reads_per_second"], 0, "{look}");
    let is_told = || {
        let cores = daemon.json("status --cpu");
        let of_core = &cores[0]["traffic"];
        for kind in ["reads", "writes", "flushes"] {
            for what in ["total", "bytes", "time_ns", "octaves"] {
                assert_eq!(of_core[kind][what], traffic[kind][what], "{kind}: {cores}");
            }
        }
        assert_eq!((&of_core["depth"], &of_core["depth_max"]), (&0.into(), &traffic["depth_max"]));
    };
    is_told();
    // A reactor's go on when an export ends.
    daemon.ok("export delete e");
    is_told();
    let shown = daemon.ok("status --cpu");
    for word in ["requests of CPU", "read      ", "depth     0 now"] {
        assert!(shown.contains(word), "{word}: {shown}");
    }
}

fn agrees_with_itself(its: &Value) {
    let octaves = its["octaves"].as_array().unwrap().iter().map(number);
    assert_eq!(octaves.sum::<u64>(), number(&its["total"]), "{its}");
    // Files: no request ends in the turn that it began in.
    assert!(number(&its["p50_ns"]) > 1000, "{its}");
    assert!(number(&its["p50_ns"]) <= number(&its["p99_ns"]), "{its}");
    // Percentiles are the ends of classes, so the longest may be below them by a sixteenth.
    let longest = number(&its["max_ns"]);
    assert!(number(&its["p999_ns"]) <= longest + longest / 16 + 64, "{its}");
    assert!(number(&its["per_second"]) > 0 && number(&its["bytes_per_second"]) > 0, "{its}");
}

#[test]
fn the_journal_is_counted() {
    let mut daemon = busy_daemon("journal");
    let array = daemon.json("array show a");
    assert_eq!(array["counters"]["journaled"], array["counters"]["writes"]);
    // It is put in place while it is looked at: until two looks in turn saw the same.
    daemon.wait_for("array show a", |array| {
        let journal = &array["journal"];
        let share = number(&journal["used_bytes"]) * 100 / number(&journal["bytes"]);
        assert_eq!(number(&journal["used_percent"]), share, "{journal}");
        let shown = daemon.ok("array show a");
        assert!(shown.contains("100 % of writes by the journal"), "{shown}");
        shown.contains(&format!("used ({share} %)"))
    });

    assert_eq!(array["replayed"], Value::Null, "it was created");
    // What is younger than some seconds is not in place.
    let line = format!("{BENCH} --rw randwrite --seconds 600 --rounds 1");
    let mut load = daemon.run_beside(660, &line);
    let journaled = |array: &Value| number(&array["counters"]["journaled"]);
    let until = journaled(&array) + REQUESTS;
    daemon.wait_for("array show a", |array| journaled(array) >= until);
    daemon.kill();
    load.wait().unwrap();
    daemon.start_again();
    let array = daemon.json("array show a");
    let replayed = &array["replayed"];
    // The rings of three members.
    assert_eq!(number(&replayed["read_bytes"]), 3 * number(&array["journal"]["bytes"]));
    assert!(number(&replayed["batches"]) > 0 && number(&replayed["bytes"]) > 4096, "{replayed}");
    let shown = daemon.ok("array show a");
    assert!(shown.contains("recovery") && shown.contains("of journals read"), "{shown}");
    let log = std::fs::read_to_string(daemon.path("log")).unwrap();
    assert!(log.contains("what its journal held was put in place"), "{log}");
    let metrics = daemon.ok("metrics");
    assert!(metrics.contains(r#"ashlar_array_recovery_seconds{array="a"}"#), "{metrics}");
    daemon.stop();
    daemon.start_again();
    assert!(daemon.ok("array show a").contains("recovery    nothing to do"));
}

#[test]
fn programs_read_all_of_it() {
    let daemon = busy_daemon("bitmap");
    daemon.ok("array scrub a --wait");
    let text = daemon.ok("metrics");
    let value = |start: &str| -> u64 {
        let line = text.lines().find(|line| line.starts_with(start));
        let line = line.unwrap_or_else(|| panic!("{start}: {text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let count = |noun: &str, label: &str, kind: &str| {
        let name = format!("ashlar_{noun}_request_duration_seconds_count");
        value(&format!(r#"{name}{{{noun}="{label}",kind="{kind}"}}"#))
    };
    assert!(count("export", "e", "read") + count("export", "e", "write") >= REQUESTS);
    assert_eq!(count("array", "a", "write"), count("export", "e", "write"));
    assert!(count("drive", "d1", "write") > 0);
    assert_eq!(value(r#"ashlar_array_state{array="a",state="optimal"}"#), 1);
    assert_eq!(value(r#"ashlar_export_errors_total{export="e"}"#), 0);
    let array = daemon.json("array show a");
    let scrubbed = number(&array["counters"]["worked"]["scrub_bytes"]);
    // All that was ever written, which is less than there is.
    assert!(scrubbed > 0 && scrubbed < number(&array["capacity_bytes"]), "{array}");
    let worked =
        |work: &str| format!(r#"ashlar_array_worked_bytes_total{{array="a",work="{work}"}}"#);
    assert_eq!((value(&worked("scrub")), value(&worked("rebuild"))), (scrubbed, 0));
    assert!(!text.contains("ashlar_array_work_ratio{"), "nothing runs: {text}");
    assert!(value("ashlar_reactor_turns_total") > 0);
    assert!(text.trim_end().ends_with("# EOF"), "{text}");
}

#[test]
fn what_goes_on_is_shown_again_and_again() {
    let daemon = busy_daemon("bitmap");
    let shown = daemon.ok("top --count 1");
    for word in ["busy: CPU", "ARRAY", "EXPORT", "READS/s", "DEPTH", "JOURNAL"] {
        assert!(shown.contains(word), "{word}: {shown}");
    }
    // Nothing is asked now; what was lately is still known.
    just_after_requests(&daemon, || {
        let lines = daemon.ok("top --count 2 -o json");
        let looks = lines.lines().map(|line| serde_json::from_str(line).unwrap());
        let looks: Vec<Value> = looks.collect();
        assert_eq!(looks.len(), 2);
        let export = &looks[1]["exports"][0];
        assert_eq!((&export["name"], &export["reads_per_second"]), (&"e".into(), &0.into()));
        (number(&export["read_p99_ns"]) > 0).then_some(())
    });
}

#[test]
fn a_slow_drive_is_shown_with_the_evidence() {
    let daemon = Daemon::start();
    daemon.ok("drive attach model:64M,iops=100000,mbps=2000,latency-us=200000 --name slow");
    daemon.ok("drive attach model:64M,iops=100000,mbps=2000 --name quick");
    daemon.ok("array create a --level 1 --drives slow,quick");
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v --path @/e.sock");
    let bench = "bench vhost --socket @/e.sock --size 4M --depth 32 --force";
    // Until the drive is found: one pause of the daemon makes the quick one slow, too, as long as
    // nothing is asked after it.
    let line = format!("{bench} --rw randwrite --seconds 600 --rounds 1");
    let mut load = daemon.run_beside(660, &line);
    daemon.wait_for("drive show slow", |drive| drive["slow"] == true);
    daemon.ok("export delete e --force");
    load.kill().unwrap();
    load.wait().unwrap();
    let drive = daemon.json("drive show slow");
    let its = &drive["slowness"];
    assert_eq!(its["kind"], "write");
    assert!(number(&its["p50_ns"]) >= 200_000_000, "{its}");
    assert!(number(&its["siblings_p50_ns"]) * 4 < number(&its["p50_ns"]), "{its}");
    let array = daemon.json("array show a");
    let members = array["members"].as_array().unwrap();
    let evidence: Vec<bool> = members.iter().map(|its| its["slowness"].is_object()).collect();
    assert_eq!(evidence, [true, false]);
    for command in ["array show a", "drive show slow", "status"] {
        let shown = daemon.ok(command);
        let said = ["writes take ", " ms at p99 (p50 ", "its siblings' "];
        assert!(said.iter().all(|words| shown.contains(words)), "{command}: {shown}");
    }
    let said = |_: &Value| daemon.log().contains("drive is slow: writes take");
    daemon.wait_for("drive show slow", said);
    let metrics = daemon.ok("metrics");
    assert!(metrics.contains(r#"ashlar_drive_slow{drive="slow"} 1"#), "{metrics}");
}

/// Array `a` with checksums, some bytes in its volume, and the daemon stopped.
fn written_with_checksums() -> Daemon {
    let mut daemon = Daemon::with_drives(3);
    daemon.ok("array create a --level 5 --drives d0,d1,d2 --integrity");
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v --path @/e.sock");
    daemon.ok(&format!("{BENCH} --fill --rw randwrite --ios 100 --rounds 1"));
    daemon.stop();
    daemon
}

fn scribble(daemon: &Daemon, drive: &str) {
    // Behind journal and checksums, where the data begins.
    let path = daemon.path(&format!("{drive}.img"));
    let file = std::fs::File::options().write(true).open(path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0x5a; 256 << 10], 13 << 19).unwrap();
}

#[test]
fn what_a_scrub_mends_and_cannot_mend_is_told() {
    let mut daemon = written_with_checksums();
    scribble(&daemon, "d1");
    daemon.start_again();
    let said = daemon.ok("array scrub a --wait");
    assert!(
        said.contains("did not fit their checksums") && !said.contains("all is well"),
        "{said}"
    );
    assert!(said.contains("drive d1, did not fit its checksum; mended"), "{said}");
    let array = daemon.json("array show a");
    let scrub = &array["scrub"];
    let damaged = number(&scrub["damaged_stripes"]);
    assert!(damaged > 0 && scrub["repaired_stripes"] == damaged, "{scrub}");
    assert!(scrub["mismatched_stripes"] == 0 && scrub["unreadable_stripes"] == 0, "{scrub}");
    assert_eq!(array["members"][1]["wrong_stripes"], damaged);
    let place = &scrub["places"][0];
    assert_eq!((&place["what"], &place["repaired"]), (&"block".into(), &true.into()));
    let metrics = daemon.ok("metrics");
    let metric = format!(r#"ashlar_array_scrub_stripes{{array="a",found="damaged"}} {damaged}"#);
    assert!(metrics.contains(&metric), "{metrics}");
    daemon.stop();
    daemon.start_again();
    assert_eq!(&daemon.json("array show a")["scrub"], scrub);
    assert!(daemon.ok("array scrub a --wait").contains("all is well"));
    // Of two drives, at the same place.
    daemon.stop();
    ["d1", "d2"].iter().for_each(|drive| scribble(&daemon, drive));
    daemon.start_again();
    let output = daemon.run("array scrub a --wait");
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("restore those ranges") && said.contains("d2, did not fit"), "{said}");
    let scrub = daemon.json("array show a")["scrub"].clone();
    let place = &scrub["places"][0];
    assert_eq!((&place["volume"], &place["repaired"]), (&"v".into(), &false.into()), "{scrub}");
    assert!(place["volume_offset"].is_u64() && number(&scrub["unreadable_stripes"]) > 0, "{scrub}");
    assert!(daemon.ok("status").contains("the last scrub could not check"));
}

#[test]
fn what_went_wrong_with_a_drive_outlives_a_restart() {
    let mut daemon = written_with_checksums();
    scribble(&daemon, "d1");
    daemon.start_again();
    daemon.ok("array scrub a --wait");
    daemon.wait_for("drive show d1", |drive| {
        drive["history"]["wrong_blocks"] == drive["counters"]["wrong_blocks"]
    });
    let wrong = daemon.json("drive show d1")["counters"]["wrong_blocks"].clone();
    assert!(number(&wrong) > 0, "{wrong}");
    daemon.stop();
    daemon.start_again();
    let drive = daemon.json("drive show d1");
    assert_eq!(drive["counters"]["wrong_blocks"], 0, "since the start");
    let history = &drive["history"];
    assert_eq!((&history["wrong_blocks"], &history["failed_s"]), (&wrong, &Value::Null));
    assert!(number(&history["since_s"]) > 1_700_000_000, "{history}");
    assert_eq!(daemon.json("drive show d0")["history"], Value::Null);
    assert!(daemon.ok("array show a").contains(&format!("{wrong} wrong blocks")));
    assert!(daemon.ok("drive show d1").contains(&format!("errors    {wrong} wrong blocks")));
    daemon.ok("drive clear d1");
    assert_eq!(daemon.json("drive show d1")["history"], Value::Null);
    let refused = daemon.refused("drive clear d1");
    assert!(refused.contains("nothing is known against drive d1"), "{refused}");
    // Not before a start, either; and what cannot be read keeps nothing from starting.
    daemon.stop();
    std::fs::write(daemon.path("state/drives.json"), "no JSON").unwrap();
    daemon.start_again();
    assert_eq!(daemon.array_state("a"), "optimal");
    assert_eq!(daemon.json("drive show d1")["history"], Value::Null);
}

/// `ashlar top | head`.
#[test]
fn top_ends_with_its_reader() {
    let daemon = Daemon::with_drives(1);
    for form in ["table", "json"] {
        let mut top = daemon.run_beside(30, &format!("top -o {form}"));
        drop(top.stdout.take());
        assert_eq!(top.wait().unwrap().code(), Some(0), "{form}");
    }
}
