//! `ashlar top`: what is asked of reactors, arrays and exports, look after look.

use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tokio::time::Instant;

use crate::api::array::{Array, ArrayCounters};
use crate::api::export::Export;
use crate::api::status::{CoreStatus, Status};
use crate::api::traffic::{Requests, Traffic};
use crate::cli::output::{Output, is_heard, or_dash, rows, table, time};
use crate::cli::traffic::{megabytes, tenths};
use crate::client::Client;
use crate::refusal::{Answer, Refusal};

/// Terminals: to the first column of the first line, and clear from there (ECMA-48, CUP and ED).
const CLEAR: &str = "\x1b[H\x1b[J";

#[derive(Args)]
pub struct Top {
    /// Seconds between two looks
    #[arg(long, default_value_t = 1, value_name = "SECONDS")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// End after so many tables; left out: when interrupted
    #[arg(long, value_name = "TABLES")]
    count: Option<u64>,
}

/// One reactor, array or export between two looks; times are those of the last five to ten seconds.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Row {
    name: String,
    reads_per_second: u64,
    writes_per_second: u64,
    flushes_per_second: u64,
    read_bytes_per_second: u64,
    write_bytes_per_second: u64,
    read_p99_ns: u64,
    write_p99_ns: u64,
    flush_p99_ns: u64,
    /// Requests under way, on average, in thousandths.
    depth_milli: u64,
    /// Of an array that has a journal.
    #[serde(skip_serializing_if = "Option::is_none")]
    journal_used_percent: Option<u8>,
}

/// Between two looks.
#[derive(Serialize)]
struct Look {
    arrays: Vec<Row>,
    exports: Vec<Row>,
    cores: Vec<CoreShare>,
}

#[derive(Serialize)]
struct CoreShare {
    cpu: usize,
    /// Millionths of the time between the looks.
    busy_ppm: Option<u64>,
    /// What its exports were asked for.
    #[serde(flatten)]
    row: Option<Row>,
}

/// One line of JSON for each look, where that is asked for. Ends with its reader, too.
pub async fn run(top: &Top, client: &Client, output: Output) -> Answer<()> {
    let (mut before, mut looked): (Status, _) = (client.get("/v1/status").await?, Instant::now());
    let mut left = top.count;
    while left != Some(0) {
        tokio::time::sleep_until(looked + Duration::from_secs(top.interval)).await;
        let after: Status = client.get("/v1/status").await?;
        let now = Instant::now();
        let look = look(&before, &after, now - looked);
        let shown = match output {
            Output::Json => serde_json::to_string(&look)
                .map_err(|error| Refusal::failed(format!("no JSON form: {error}")))?,
            Output::Table if std::io::stdout().is_terminal() => {
                format!("{CLEAR}{}", screen(&look))
            }
            Output::Table => format!("{}\n", screen(&look)),
        };
        if !is_heard(&shown)? {
            return Ok(());
        }
        (before, looked) = (after, now);
        left = left.map(|left| left - 1);
    }
    Ok(())
}

fn look(before: &Status, after: &Status, passed: Duration) -> Look {
    let array = |its: &Array| {
        let old = before.arrays.iter().find(|old| old.uuid == its.uuid)?;
        let shown = row(&its.name, old.traffic.as_ref()?, its.traffic.as_ref()?, passed);
        let journal = its.journal.filter(|journal| journal.bytes > 0);
        // Of reads that other reactors do themselves nobody keeps times.
        let reads = |count: fn(&ArrayCounters) -> u64| {
            let counters = old.counters.as_ref().zip(its.counters.as_ref());
            let grown = counters.map(|(old, new)| count(new).saturating_sub(count(old)));
            grown.map(|grown| over(grown, 1_000_000_000, passed))
        };
        Some(Row {
            journal_used_percent: journal.map(|journal| journal.used_percent),
            reads_per_second: reads(|its| its.reads).unwrap_or(shown.reads_per_second),
            read_bytes_per_second: reads(|its| its.read_bytes)
                .unwrap_or(shown.read_bytes_per_second),
            ..shown
        })
    };
    let export = |its: &Export| {
        let old = before.exports.iter().find(|old| old.name == its.name);
        let old = old.and_then(|old| old.traffic.as_ref());
        Some(row(&its.name, old?, its.traffic.as_ref()?, passed))
    };
    let core = |its: &CoreStatus| {
        let old = before.cores.iter().find(|old| old.cpu == its.cpu);
        let counters = its.counters.zip(old.and_then(|old| old.counters));
        let busy_ns = counters.map(|(new, old)| new.busy_ns.saturating_sub(old.busy_ns));
        let ppm = |busy_ns| over(busy_ns, 1_000_000, passed).min(1_000_000);
        let traffic = old.and_then(|old| old.traffic.as_ref()).zip(its.traffic.as_ref());
        let row = traffic.map(|(old, new)| row(&its.cpu.to_string(), old, new, passed));
        CoreShare { cpu: its.cpu, busy_ppm: busy_ns.map(ppm), row }
    };
    Look {
        arrays: after.arrays.iter().filter_map(array).collect(),
        exports: after.exports.iter().filter_map(export).collect(),
        cores: after.cores.iter().map(core).collect(),
    }
}

fn row(name: &str, before: &Traffic, after: &Traffic, passed: Duration) -> Row {
    let [reads, writes, flushes] = [
        grown(&before.reads, &after.reads),
        grown(&before.writes, &after.writes),
        grown(&before.flushes, &after.flushes),
    ];
    let per_second = |count| over(count, 1_000_000_000, passed);
    Row {
        name: name.to_owned(),
        reads_per_second: per_second(reads.count),
        writes_per_second: per_second(writes.count),
        flushes_per_second: per_second(flushes.count),
        read_bytes_per_second: per_second(reads.bytes),
        write_bytes_per_second: per_second(writes.bytes),
        read_p99_ns: after.reads.p99_ns,
        write_p99_ns: after.writes.p99_ns,
        flush_p99_ns: after.flushes.p99_ns,
        // Little's law.
        depth_milli: over(reads.time_ns + writes.time_ns + flushes.time_ns, 1000, passed),
        journal_used_percent: None,
    }
}

struct Grown {
    count: u64,
    bytes: u64,
    time_ns: u64,
}

/// What was started anew in between counts from zero again: then nothing is said.
fn grown(before: &Requests, after: &Requests) -> Grown {
    Grown {
        count: after.total.saturating_sub(before.total),
        bytes: after.bytes.saturating_sub(before.bytes),
        time_ns: after.time_ns.saturating_sub(before.time_ns),
    }
}

/// `amount` of so many units, for each nanosecond that passed.
fn over(amount: u64, units: u64, passed: Duration) -> u64 {
    let amount = u128::from(amount) * u128::from(units) / passed.as_nanos().max(1);
    u64::try_from(amount).unwrap_or(u64::MAX)
}

fn screen(look: &Look) -> String {
    let share = |its: &CoreShare| {
        let busy = its.busy_ppm.map(|ppm| format!("{} %", tenths(ppm / 10)));
        format!("CPU {} {}", its.cpu, or_dash(busy))
    };
    let shares: Vec<String> = look.cores.iter().map(share).collect();
    let of_cores = look.cores.iter().filter_map(|its| its.row.as_ref());
    let parts = [
        format!("busy: {}", shares.join(", ")),
        rows_table("CPU", of_cores, "no reactor answers"),
        rows_table("ARRAY", &look.arrays, "no arrays run"),
        rows_table("EXPORT", &look.exports, "no exports"),
    ];
    parts.join("\n\n")
}

fn rows_table<'a>(
    head: &str,
    shown: impl IntoIterator<Item = &'a Row, IntoIter: Clone>,
    none: &str,
) -> String {
    let shown = shown.into_iter();
    let with_journal = shown.clone().any(|row| row.journal_used_percent.is_some());
    let mut heads = vec![
        head,
        "READS/s>",
        "WRITES/s>",
        "FLUSHES/s>",
        "READ MB/s>",
        "WRITE MB/s>",
        "READ p99>",
        "WRITE p99>",
        "FLUSH p99>",
        "DEPTH>",
    ];
    heads.extend(with_journal.then_some("JOURNAL>"));
    let mut lines = table(&heads);
    for row in shown {
        let p99 = |ns: u64| or_dash((ns > 0).then(|| time(ns)));
        let mut cells = vec![
            row.name.clone(),
            row.reads_per_second.to_string(),
            row.writes_per_second.to_string(),
            row.flushes_per_second.to_string(),
            megabytes(row.read_bytes_per_second),
            megabytes(row.write_bytes_per_second),
            p99(row.read_p99_ns),
            p99(row.write_p99_ns),
            p99(row.flush_p99_ns),
            tenths(row.depth_milli),
        ];
        let fill = row.journal_used_percent.map(|percent| format!("{percent} %"));
        cells.extend(with_journal.then(|| or_dash(fill)));
        lines.add_row(cells);
    }
    rows(&lines, none)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_what_came_between_two_looks() {
        let requests = |total, time_ns| Requests {
            total,
            bytes: total * 4096,
            time_ns,
            p99_ns: 1_500_000,
            ..Requests::default()
        };
        let before = Traffic { reads: requests(1_000, 7), ..Traffic::default() };
        let after = Traffic { reads: requests(3_000, 5_000_000_007), ..Traffic::default() };
        let shown = row("main", &before, &after, Duration::from_secs(2));
        assert_eq!((shown.reads_per_second, shown.read_bytes_per_second), (1_000, 4_096_000));
        // Two seconds, and five of waiting in them.
        assert_eq!((shown.depth_milli, shown.writes_per_second), (2_500, 0));
        let line = rows_table("ARRAY", &[shown], "none");
        let words: Vec<&str> = line.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(words, ["main", "1000", "0", "0", "4.0", "0.0", "1.5ms", "-", "-", "2.5"]);
        // Started anew.
        let anew = row("main", &after, &before, Duration::from_secs(1));
        assert_eq!((anew.reads_per_second, anew.depth_milli), (0, 0));
    }
}
