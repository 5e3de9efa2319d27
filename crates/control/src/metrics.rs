//! Everything that is counted, in the text format of OpenMetrics 1.0, which Prometheus reads.
//!
//! Names follow Prometheus' rules: base units, `_total` for what only grows. Of requests there are
//! histograms, so that percentiles can be had of any time and of any set of arrays.

use std::fmt::Error;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use crate::api::array::{Array, ArrayState, JournalReplay, Progress, ScrubState};
use crate::api::export::{ExportCounters, ExportState};
use crate::api::status::Status;
use crate::api::traffic::{Requests, Traffic};

pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The daemon at one moment.
pub fn text(status: Status) -> Result<String, Error> {
    let mut registry = Registry::with_prefix("ashlar");
    registry.register_collector(Box::new(Moment(status)));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct Moment(Status);

type Labels<'a> = Vec<(&'static str, &'a str)>;

impl Collector for Moment {
    fn encode(&self, encoder: DescriptorEncoder) -> Result<(), Error> {
        let mut page = Page(encoder);
        page.reactors(&self.0)?;
        page.drives(&self.0)?;
        page.arrays(&self.0.arrays)?;
        page.exports(&self.0)
    }
}

struct Page<'a>(DescriptorEncoder<'a>);

impl Page<'_> {
    fn reactors(&mut self, status: &Status) -> Result<(), Error> {
        let named: Vec<(String, _)> = status
            .cores
            .iter()
            .filter_map(|its| Some((its.cpu.to_string(), its.counters?)))
            .collect();
        let of = |value: fn(&crate::api::status::CoreCounters) -> u64| {
            named.iter().map(move |(cpu, its)| (vec![("cpu", cpu.as_str())], value(its)))
        };
        let help = "Time in which the reactor worked on operations";
        self.seconds("reactor_busy", help, of(|its| its.busy_ns))?;
        self.seconds("reactor_slept", "Time in which the reactor slept", of(|its| its.slept_ns))?;
        let help = "Looks at everything that may bring work";
        self.counter("reactor_turns", help, of(|its| its.turns))?;
        self.counter("reactor_enters", "Calls of io_uring_enter", of(|its| its.enters))?;
        let help = "Operations that the kernel has completed";
        self.counter("reactor_operations", help, of(|its| its.completions))?;
        let served = status.cores.iter();
        let served: Vec<_> =
            served.filter_map(|its| Some((its.cpu.to_string(), its.traffic.as_ref()?))).collect();
        self.traffic("reactor", "cpu", served.iter().map(|(cpu, its)| (cpu, *its)))
    }

    fn drives(&mut self, status: &Status) -> Result<(), Error> {
        let known =
            || status.drives.iter().filter_map(|its| Some((&its.name, its.traffic.as_ref()?)));
        self.traffic("drive", "drive", known())?;
        let errors = status.drives.iter().filter_map(|its| Some((&its.name, its.counters?)));
        let errors = errors.flat_map(|(name, its)| {
            let kinds = [
                ("read", its.read_errors),
                ("write", its.write_errors),
                ("timeout", its.timeouts),
                ("wrong_block", its.wrong_blocks),
                ("wrong_checksum", its.wrong_checksums),
                ("no_space", its.no_space),
            ];
            kinds.map(|(kind, count)| (vec![("drive", name.as_str()), ("kind", kind)], count))
        });
        let help = "What a drive did wrong; reads and writes that failed after retries";
        self.counter("drive_errors", help, errors)?;
        let compared = status.drives.iter().filter_map(|its| Some((its.name.as_str(), its.slow?)));
        let slow = compared.map(|(name, slow)| (vec![("drive", name)], u64::from(slow)));
        let help = "1 for a drive that takes several times as long as its siblings";
        self.gauge("drive_slow", help, slow)?;
        let paths = status.drives.iter().filter_map(|its| Some((&its.name, its.path.as_ref()?)));
        let reconnects =
            paths.map(|(name, path)| (vec![("drive", name.as_str())], path.reconnects));
        let help = "Times that a drive of another host was connected again";
        self.counter("drive_reconnects", help, reconnects)
    }

    fn arrays(&mut self, arrays: &[Array]) -> Result<(), Error> {
        let states = arrays.iter().flat_map(|its| {
            STATES.map(|(state, name)| {
                let labels = vec![("array", its.name.as_str()), ("state", name)];
                (labels, u64::from(its.state == state))
            })
        });
        self.gauge("array_state", "1 for the state that the array is in", states)?;
        let known = || arrays.iter().filter_map(|its| Some((&its.name, its.traffic.as_ref()?)));
        self.traffic("array", "array", known())?;
        let counted = arrays.iter().filter_map(|its| Some((its.name.as_str(), its.counters?)));
        let counted: Vec<_> = counted.collect();
        let of = |value: fn(&crate::api::array::ArrayCounters) -> u64| {
            counted.iter().map(move |(name, its)| (vec![("array", *name)], value(its)))
        };
        let help = "Reads, those that other reactors do themselves and nobody times included";
        self.counter("array_reads", help, of(|its| its.reads))?;
        let help = "What these read";
        self.counter("array_read_bytes", help, of(|its| its.read_bytes))?;
        let help = "Writes that were acknowledged by the journal";
        self.counter("array_journaled_writes", help, of(|its| its.journaled))?;
        let help = "Reads that were worked out from the other members";
        self.counter("array_reconstructed_reads", help, of(|its| its.reconstructed))?;
        let help = "Reads that were also asked of the other members";
        self.counter("array_hedged_reads", help, of(|its| its.hedged))?;
        let help = "Blocks that were rewritten since they could not be read, or were wrong";
        self.counter("array_repaired_blocks", help, of(|its| its.repaired))?;
        let updates = counted.iter().flat_map(|(name, its)| {
            let kinds = [
                ("plain", its.updates.plain),
                ("whole_stripe", its.updates.whole_stripe),
                ("read_modify_write", its.updates.read_modify_write),
                ("reconstruct_write", its.updates.reconstruct_write),
                ("decode", its.updates.decode),
            ];
            kinds.map(|(plan, count)| (vec![("array", *name), ("plan", plan)], count))
        });
        let help = "Parts of stripes that were put in place, by what was read for their parity";
        self.counter("array_updates", help, updates)?;
        self.work(arrays)?;
        let journals: Vec<_> =
            arrays.iter().filter_map(|its| Some((its.name.as_str(), its.journal?))).collect();
        let of = |value: fn(&crate::api::array::JournalFill) -> u64| {
            journals.iter().map(move |(name, its)| (vec![("array", *name)], value(its)))
        };
        self.gauge("array_journal_size_bytes", "The journal on each member", of(|its| its.bytes))?;
        let help = "Of the journal, what would be read after a crash";
        self.gauge("array_journal_used_bytes", help, of(|its| its.used_bytes))?;
        let help = "Acknowledged by the journal, and not in place yet";
        self.gauge("array_journal_pending_bytes", help, of(|its| its.pending_bytes))?;
        self.replays(arrays)?;
        self.scrubs(arrays)
    }

    /// What the scrub that runs has found, or the last one.
    fn scrubs(&mut self, arrays: &[Array]) -> Result<(), Error> {
        let scrubs = arrays.iter().filter_map(|its| Some((its.name.as_str(), its.scrub.as_ref()?)));
        let known: Vec<_> = scrubs.filter(|(_, its)| its.state != ScrubState::Never).collect();
        let found = known.iter().flat_map(|(name, its)| {
            let kinds = [
                ("mismatched", its.mismatched_stripes),
                ("undecided", its.undecided_stripes),
                ("damaged", its.damaged_stripes),
                ("repaired", its.repaired_stripes),
                ("unreadable", its.unreadable_stripes),
                ("bad", its.bad_stripes),
            ];
            kinds.map(|(found, count)| (vec![("array", *name), ("found", found)], count))
        });
        self.gauge("array_scrub_stripes", "What the last scrub found, or has found so far", found)?;
        let ended = known.iter().filter_map(|(name, its)| {
            Some((vec![("array", *name)], seconds(its.ended_s?.saturating_mul(1_000_000_000))))
        });
        let help = "When the last scrub ended, since 1970";
        self.gauge_in(Unit::Seconds, "array_scrub_ended_timestamp", help, ended)
    }

    /// What the last start of each array had to put in place.
    fn replays(&mut self, arrays: &[Array]) -> Result<(), Error> {
        let known: Vec<_> =
            arrays.iter().filter_map(|its| Some((its.name.as_str(), its.replayed?))).collect();
        let of = |value: fn(&JournalReplay) -> u64| {
            known.iter().map(move |(name, its)| (vec![("array", *name)], value(its)))
        };
        let help = "Read of the members' journals at the last start";
        self.gauge("array_recovery_read_bytes", help, of(|its| its.read_bytes))?;
        let help = "Found in the journals at the last start, and put in place";
        self.gauge("array_recovery_replayed_bytes", help, of(|its| its.bytes))?;
        let took = known.iter().map(|(name, its)| {
            (vec![("array", *name)], seconds(its.took_ms.saturating_mul(1_000_000)))
        });
        self.gauge_in(Unit::Seconds, "array_recovery", "How long that took", took)
    }

    /// Rebuild, resync, restripe and scrub.
    fn work(&mut self, arrays: &[Array]) -> Result<(), Error> {
        let worked = arrays.iter().filter_map(|its| Some((&its.name, its.counters?.worked)));
        let worked = worked.flat_map(|(name, its)| {
            let kinds = [
                ("rebuild", its.rebuild_bytes),
                ("resync", its.resync_bytes),
                ("restripe", its.restripe_bytes),
                ("scrub", its.scrub_bytes),
            ];
            kinds.map(|(work, bytes)| (vec![("array", name.as_str()), ("work", work)], bytes))
        });
        let help = "Written by a rebuild; of data that was made to agree, moved or verified";
        self.counter("array_worked_bytes", help, worked)?;
        // What does not run is left out: a zero would look as if it had begun anew.
        let running: Vec<_> = arrays.iter().flat_map(works).collect();
        let help = "How much of the work that runs is done";
        let ratio = |its: &Progress| its.stripes_done as f64 / its.stripes_total.max(1) as f64;
        let unit = Unit::Other("ratio".into());
        self.gauge_in(
            unit,
            "array_work",
            help,
            running.iter().map(|(of, its)| (of.clone(), ratio(its))),
        )
    }

    fn exports(&mut self, status: &Status) -> Result<(), Error> {
        let known =
            || status.exports.iter().filter_map(|its| Some((&its.name, its.traffic.as_ref()?)));
        self.traffic("export", "export", known())?;
        // What is not known is left out: a zero would look as if it had begun anew.
        let counted = |count: fn(&ExportCounters) -> u64| {
            let known = status.exports.iter().filter(|its| its.traffic.is_some());
            known.map(move |its| (vec![("export", its.name.as_str())], count(&its.counters)))
        };
        let errors = counted(|its| its.errors);
        self.counter("export_errors", "Requests that were answered with an error", errors)?;
        let limited = counted(|its| its.limited);
        self.counter("export_limited", "Requests that had to wait because of a limit", limited)?;
        let states = status.exports.iter().flat_map(|its| {
            EXPORT_STATES.map(|state| {
                let labels = vec![("export", its.name.as_str()), ("state", state.name())];
                (labels, u64::from(its.state == state))
            })
        });
        self.gauge("export_state", "1 for the state that the export is in", states)?;
        let queues = status
            .exports
            .iter()
            .map(|its| (vec![("export", its.name.as_str())], u64::from(its.queues_active)));
        self.gauge("export_queues_active", "Queues that the guest uses", queues)
    }

    /// Histograms of times, bytes, and how many requests are under way.
    fn traffic<'a>(
        &mut self,
        noun: &'static str,
        label: &'static str,
        of: impl Iterator<Item = (&'a String, &'a Traffic)> + Clone,
    ) -> Result<(), Error> {
        let kinds = of.clone().flat_map(|(name, its)| {
            let kinds = [("read", &its.reads), ("write", &its.writes), ("flush", &its.flushes)];
            kinds.map(|(kind, its)| (vec![(label, name.as_str()), ("kind", kind)], its))
        });
        self.times(&format!("{noun}_request_duration"), kinds.clone())?;
        let moved = kinds.filter(|(labels, _)| labels[1].1 != "flush");
        let moved = moved.map(|(labels, its)| (labels, its.bytes));
        self.counter(&format!("{noun}_request_bytes"), "Bytes of requests", moved)?;
        let depths = of
            .filter_map(|(name, its)| Some((vec![(label, name.as_str())], u64::from(its.depth?))));
        self.gauge(&format!("{noun}_requests_under_way"), "Requests of any kind", depths)
    }

    fn times<'a>(
        &mut self,
        name: &str,
        of: impl Iterator<Item = (Labels<'a>, &'a Requests)>,
    ) -> Result<(), Error> {
        let help = "How long requests took";
        let (unit, kind) = (Unit::Seconds, MetricType::Histogram);
        let mut metric = self.0.encode_descriptor(name, help, Some(&unit), kind)?;
        for (labels, its) in of {
            let buckets: Vec<(f64, u64)> =
                its.octaves.iter().enumerate().map(bucket_of(its)).collect();
            let mut one = metric.encode_family(&labels)?;
            one.encode_histogram::<NoLabelSet>(seconds(its.time_ns), its.total, &buckets, None)?;
        }
        Ok(())
    }

    /// `of`: in nanoseconds.
    fn seconds<'a>(
        &mut self,
        name: &str,
        help: &str,
        of: impl Iterator<Item = (Labels<'a>, u64)>,
    ) -> Result<(), Error> {
        let (unit, kind) = (Unit::Seconds, MetricType::Counter);
        let mut metric = self.0.encode_descriptor(name, help, Some(&unit), kind)?;
        for (labels, ns) in of {
            let mut one = metric.encode_family(&labels)?;
            one.encode_counter::<NoLabelSet, f64, u64>(&seconds(ns), None)?;
        }
        Ok(())
    }

    fn counter<'a>(
        &mut self,
        name: &str,
        help: &str,
        of: impl Iterator<Item = (Labels<'a>, u64)>,
    ) -> Result<(), Error> {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, count) in of {
            let mut one = metric.encode_family(&labels)?;
            one.encode_counter::<NoLabelSet, u64, u64>(&count, None)?;
        }
        Ok(())
    }

    fn gauge_in<'a>(
        &mut self,
        unit: Unit,
        name: &str,
        help: &str,
        of: impl Iterator<Item = (Labels<'a>, f64)>,
    ) -> Result<(), Error> {
        let kind = MetricType::Gauge;
        let mut metric = self.0.encode_descriptor(name, help, Some(&unit), kind)?;
        for (labels, value) in of {
            metric.encode_family(&labels)?.encode_gauge(&value)?;
        }
        Ok(())
    }

    fn gauge<'a>(
        &mut self,
        name: &str,
        help: &str,
        of: impl Iterator<Item = (Labels<'a>, u64)>,
    ) -> Result<(), Error> {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in of {
            metric.encode_family(&labels)?.encode_gauge(&value)?;
        }
        Ok(())
    }
}

const EXPORT_STATES: [ExportState; 3] =
    [ExportState::Listening, ExportState::Connected, ExportState::Down];

const STATES: [(ArrayState, &str); 6] = [
    (ArrayState::Optimal, "optimal"),
    (ArrayState::Degraded, "degraded"),
    (ArrayState::Failed, "failed"),
    (ArrayState::Stopped, "stopped"),
    (ArrayState::Unavailable, "unavailable"),
    (ArrayState::Silent, "silent"),
];

/// What runs in an array, as metrics name it.
fn works(array: &Array) -> Vec<(Labels<'_>, Progress)> {
    let scrub = array.scrub.as_ref().and_then(|its| its.progress);
    let kinds = [
        ("rebuild", array.rebuild),
        ("resync", array.resync),
        ("restripe", array.restripe),
        ("scrub", scrub),
    ];
    let labels = |work| vec![("array", array.name.as_str()), ("work", work)];
    kinds.into_iter().filter_map(|(work, its)| Some((labels(work), its?))).collect()
}

/// The upper end of each octave; the last has none.
fn bucket_of(its: &Requests) -> impl Fn((usize, &u64)) -> (f64, u64) {
    let last = its.octaves.len().saturating_sub(1);
    move |(index, count)| {
        let end = if index == last { f64::MAX } else { seconds(1024 << index.min(40)) };
        (end, *count)
    }
}

/// Nobody counts on the last nanosecond of months.
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    //! Goal: what Prometheus reads is complete, and counts what the API shows.
    //! Method: a made-up moment; lines of the text.

    use super::*;
    use crate::api::status::{CoreCounters, CoreStatus};

    fn status() -> Status {
        let mut octaves = vec![0; 27];
        (octaves[0], octaves[7], octaves[26]) = (2, 3, 1);
        let reads = Requests {
            total: 6,
            bytes: 24_576,
            time_ns: 1_500_000_000,
            octaves,
            ..Requests::default()
        };
        let traffic = Traffic { reads, depth: Some(4), ..Traffic::default() };
        let export = crate::api::export::Export {
            name: "pg".into(),
            volume: "v".into(),
            array: "main".into(),
            kind: crate::api::export::ExportKind::VhostUserBlk,
            place: "/run/pg.sock".into(),
            socket: Some("/run/pg.sock".into()),
            socket_access: None,
            queues: Some(1),
            serial: None,
            state: ExportState::Connected,
            unreachable: None,
            error: None,
            limits: Default::default(),
            queues_active: 1,
            parts: Vec::new(),
            counters: ExportCounters { errors: 5, limited: 7, ..Default::default() },
            traffic: Some(traffic.clone()),
            way: None,
            qemu: None,
            libvirt: None,
            places: Vec::new(),
            nvme: None,
        };
        let counters = CoreCounters { busy_ns: 2_500_000_000, turns: 7, ..CoreCounters::default() };
        let core = CoreStatus {
            cpu: 3,
            node: 0,
            cache: 0,
            arrays: Vec::new(),
            drives: Vec::new(),
            exports: Vec::new(),
            traffic: Some(traffic.clone()),
            counters: Some(counters),
            memory: None,
            io_uring: None,
        };
        Status {
            version: String::new(),
            pid: 1,
            uptime_s: 1,
            cores: vec![core],
            drives: Vec::new(),
            arrays: Vec::new(),
            spares: Vec::new(),
            volumes: Vec::new(),
            exports: vec![export],
            problems: Vec::new(),
        }
    }

    #[test]
    fn what_is_counted_is_told() {
        let text = text(status()).unwrap();
        let has = |line: &str| assert!(text.lines().any(|its| its == line), "{line}:\n{text}");
        has("# TYPE ashlar_export_request_duration_seconds histogram");
        let labels = r#"export="pg",kind="read""#;
        // Buckets count everything below their end.
        for (end, count) in
            [("0.000001024", 2), ("0.000131072", 5), ("34.359738368", 5), ("+Inf", 6)]
        {
            has(&format!(
                r#"ashlar_export_request_duration_seconds_bucket{{le="{end}",{labels}}} {count}"#
            ));
        }
        has(&format!("ashlar_export_request_duration_seconds_sum{{{labels}}} 1.5"));
        has(&format!("ashlar_export_request_duration_seconds_count{{{labels}}} 6"));
        has(&format!("ashlar_export_request_bytes_total{{{labels}}} 24576"));
        has(r#"ashlar_export_requests_under_way{export="pg"} 4"#);
        has(r#"ashlar_export_errors_total{export="pg"} 5"#);
        has(r#"ashlar_export_limited_total{export="pg"} 7"#);
        has(r#"ashlar_reactor_busy_seconds_total{cpu="3"} 2.5"#);
        has(r#"ashlar_reactor_turns_total{cpu="3"} 7"#);
        has(r#"ashlar_reactor_request_bytes_total{cpu="3",kind="read"} 24576"#);
        has("# EOF");
    }

    #[test]
    fn work_is_told_while_it_runs() {
        let mut status = status();
        let array = serde_json::json!({
            "name": "main", "uuid": uuid::Uuid::nil(), "state": "degraded",
            "members": [], "volumes": [],
            "rebuild": {
                "stripes_done": 3, "stripes_total": 8, "percent": 37, "elapsed_ms": 9,
                "bytes_per_second": 1000, "remaining_ms": 5,
            },
        });
        status.arrays.push(serde_json::from_value(array).unwrap());
        let text = text(status).unwrap();
        let told: Vec<_> = text.lines().filter(|its| its.contains("_work_ratio{")).collect();
        assert_eq!(told, [r#"ashlar_array_work_ratio{array="main",work="rebuild"} 0.375"#]);
    }

    #[test]
    fn what_an_export_that_is_down_has_counted_is_left_out() {
        let mut status = status();
        let mut down = status.exports[0].clone();
        down.name = "down".into();
        down.state = ExportState::Down;
        (down.traffic, down.counters, down.queues_active) = (None, Default::default(), 0);
        status.exports.push(down);
        let text = text(status).unwrap();
        let of_it: Vec<_> = text.lines().filter(|its| its.contains(r#"{export="down""#)).collect();
        assert_eq!(
            of_it,
            [
                r#"ashlar_export_state{export="down",state="listening"} 0"#,
                r#"ashlar_export_state{export="down",state="connected"} 0"#,
                r#"ashlar_export_state{export="down",state="down"} 1"#,
                r#"ashlar_export_queues_active{export="down"} 0"#,
            ]
        );
        assert!(text.contains(r#"ashlar_export_errors_total{export="pg"} 5"#), "{text}");
    }
}
