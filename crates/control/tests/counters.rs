//! Goal: an operator, and Prometheus, see what is asked of arrays and exports, and what that costs.
//! Method: requests over an export's socket; counters, rates, times and depth in every form.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use daemon::Daemon;
use serde_json::Value;

const REQUESTS: u64 = 2000;

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

/// A daemon with array `a` and export `e`, which was asked for reads and writes of 4 KiB.
fn busy_daemon(policy: &str) -> Daemon {
    let daemon = Daemon::with_drives(3);
    let create = "array create a --level 5 --drives d0,d1,d2";
    daemon.ok(&format!("{create} --policy {policy}"));
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v --path @/e.sock");
    let bench = "bench vhost --socket @/e.sock --size 4M --depth 8 --force";
    // Blocks that were never written cost no drive's work, so all are, before.
    daemon.ok(&format!("{bench} --fill --rw randrw --ios {REQUESTS} --rounds 1"));
    daemon
}

#[test]
fn requests_are_counted_timed_and_shown() {
    let daemon = busy_daemon("bitmap");
    let export = daemon.json("export show e");
    let traffic = &export["traffic"];
    let (reads, writes) = (&traffic["reads"], &traffic["writes"]);
    let all = number(&reads["total"]) + number(&writes["total"]);
    assert!(all >= REQUESTS, "{traffic}");
    assert_eq!(reads["total"], export["counters"]["reads"]);
    assert_eq!(number(&reads["bytes"]), 4096 * number(&reads["total"]));
    for its in [reads, writes] {
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

    let shown = daemon.ok("export show e");
    for word in ["read      ", "p99.9", "max", "lately", "depth     0 now"] {
        assert!(shown.contains(word), "{word}: {shown}");
    }
    let shown = daemon.ok("array show a");
    assert!(shown.contains("stored      in place 100 % reconstruct-write"), "{shown}");
    assert!(daemon.ok("drive show d0").contains("reads/s ("));
}

#[test]
fn the_journal_is_counted() {
    let daemon = busy_daemon("journal");
    let array = daemon.json("array show a");
    assert_eq!(array["counters"]["journaled"], array["counters"]["writes"]);
    let journal = &array["journal"];
    let share = number(&journal["used_bytes"]) * 100 / number(&journal["bytes"]);
    assert_eq!(number(&journal["used_percent"]), share, "{journal}");
    let shown = daemon.ok("array show a");
    assert!(shown.contains("100 % of writes by the journal"), "{shown}");
    assert!(shown.contains(&format!("used ({share} %)")), "{shown}");
}

#[test]
fn programs_read_all_of_it() {
    let daemon = busy_daemon("bitmap");
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
    let lines = daemon.ok("top --count 2 -o json");
    let looks: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(looks.len(), 2);
    // Nothing is asked now; what was lately is still known.
    let export = &looks[1]["exports"][0];
    assert_eq!((&export["name"], &export["reads_per_second"]), (&"e".into(), &0.into()));
    assert!(number(&export["read_p99_ns"]) > 0, "{export}");
}
