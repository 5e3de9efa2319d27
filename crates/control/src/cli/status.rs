//! `ashlar status`

use std::time::Duration;

use clap::Args;

use crate::api::status as api;
use crate::api::status::{CoreMemory, CoreStatus, PageBytes};
use crate::cli::array::arrays_table;
use crate::cli::drive::drives_table;
use crate::cli::export::exports_table;
use crate::cli::output::{Output, duration, listed, or_dash, rows, show, table};
use crate::cli::spare::spares_table;
use crate::cli::traffic;
use crate::cli::volume::volumes_table;
use crate::client::Client;
use crate::refusal::Answer;
use crate::size::Size;

#[derive(Args)]
pub struct Status {
    /// Wait until the daemon answers, at most this many seconds
    #[arg(long, value_name = "SECONDS")]
    wait_up: Option<u64>,
    /// Only reactors: on which CPU each runs, how busy it is, what it was asked for, and what lives
    /// there
    #[arg(long)]
    cpu: bool,
}

pub async fn run(status: Status, client: &Client, output: Output) -> Answer<()> {
    if let Some(seconds) = status.wait_up {
        client.wait_up(Duration::from_secs(seconds)).await?;
    }
    let only_cpus = status.cpu;
    let status: api::Status = client.get("/v1/status").await?;
    if only_cpus {
        return show(output, &status.cores, |cores| cpus(cores));
    }
    show(output, &status, screen)
}

fn screen(status: &api::Status) -> String {
    let cpus: Vec<String> = status.cores.iter().map(|core| core.cpu.to_string()).collect();
    let mut parts = vec![format!(
        "ashlar {}, process {}, up {}, reactors on CPU {}",
        status.version,
        status.pid,
        duration(status.uptime_s.saturating_mul(1000)),
        cpus.join(", ")
    )];
    parts.extend(memory(&status.cores));
    if !status.problems.is_empty() {
        let problems = status.problems.iter().map(|problem| format!("! {problem}"));
        parts.push(problems.collect::<Vec<_>>().join("\n"));
    }
    parts.push(arrays_table(&status.arrays));
    if !status.arrays.is_empty() {
        parts.push(volumes_table(&status.volumes));
    }
    if !status.volumes.is_empty() || !status.exports.is_empty() {
        parts.push(exports_table(&status.exports));
    }
    if !status.spares.is_empty() {
        parts.push(spares_table(&status.spares));
    }
    parts.push(drives_table(&status.drives));
    parts.join("\n\n")
}

/// Reactors, and under them what the kernel gives each.
fn cpus(cores: &[CoreStatus]) -> String {
    let mut shown = table(&[
        "CPU>",
        "NODE>",
        "CACHE>",
        "BUSY>",
        "ASLEEP>",
        "TURNS>",
        "CALLS>",
        "OPERATIONS>",
        "ARRAYS",
        "DRIVES",
        "EXPORTS (QUEUES)",
    ]);
    for core in cores {
        let its = core.counters.as_ref();
        let exports = core.exports.iter();
        let exports = exports.map(|its| format!("{} ({})", its.name, its.queues_active));
        shown.add_row([
            core.cpu.to_string(),
            core.node.to_string(),
            core.cache.to_string(),
            or_dash(its.map(|its| percent(its.busy_ppm))),
            or_dash(its.map(|its| duration(its.slept_ns / 1_000_000))),
            or_dash(its.map(|its| its.turns)),
            or_dash(its.map(|its| its.enters)),
            or_dash(its.map(|its| its.completions)),
            listed(&core.arrays),
            listed(&core.drives),
            listed(&exports.collect::<Vec<_>>()),
        ]);
    }
    let mut parts = vec![rows(&shown, "no reactors")];
    parts.extend(memory(cores));
    parts.extend(cores.iter().filter_map(traffic_of));
    parts.extend(cores.iter().filter_map(kernel));
    parts.join("\n\n")
}

fn traffic_of(core: &CoreStatus) -> Option<String> {
    let head = format!("requests of CPU {}", core.cpu);
    let lines = traffic::lines(core.traffic.as_ref()?, 10);
    Some(std::iter::once(head).chain(lines).collect::<Vec<_>>().join("\n"))
}

/// Millionths, to a tenth: `0.3 %`.
fn percent(ppm: u32) -> String {
    format!("{}.{} %", ppm / 10_000, ppm / 1_000 % 10)
}

/// `memory: buffers 32M on huge pages; drives 1G on transparent huge pages`
fn memory(cores: &[CoreStatus]) -> Option<String> {
    let sum = |of: fn(&CoreMemory) -> PageBytes| {
        let all = cores.iter().filter_map(|core| core.memory.as_ref().map(of));
        all.fold(PageBytes::default(), |sum, its| PageBytes {
            huge: sum.huge + its.huge,
            transparent: sum.transparent + its.transparent,
            small: sum.small + its.small,
        })
    };
    let kinds = [("buffers", sum(|its| its.buffers)), ("drives", sum(|its| its.drives))];
    let kinds = kinds.iter().filter_map(|(what, bytes)| Some(format!("{what} {}", pages(bytes)?)));
    let kinds: Vec<String> = kinds.collect();
    (!kinds.is_empty()).then(|| format!("memory: {}", kinds.join("; ")))
}

fn pages(bytes: &PageBytes) -> Option<String> {
    let kinds = [
        (bytes.huge, "huge pages"),
        (bytes.transparent, "transparent huge pages"),
        (bytes.small, "small pages"),
    ];
    let some = kinds.iter().filter(|(bytes, _)| *bytes > 0);
    let some: Vec<String> = some.map(|(bytes, on)| format!("{} on {on}", Size(*bytes))).collect();
    (!some.is_empty()).then(|| some.join(", "))
}

fn kernel(core: &CoreStatus) -> Option<String> {
    let its = core.io_uring.as_ref()?;
    let mut lines = vec![
        format!("io_uring of CPU {}", core.cpu),
        format!("setup       {}", listed(&its.setup)),
    ];
    let refused = its.refused.iter();
    lines.extend(refused.map(|its| format!("refused     {} ({})", its.setup, its.error)));
    lines.push(format!("features    {}", listed(&its.features)));
    lines.push(format!("operations  {}", listed(&its.operations)));
    Some(lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_told_by_its_pages() {
        let core = |huge, drives| CoreStatus {
            cpu: 0,
            node: 0,
            cache: 0,
            arrays: Vec::new(),
            drives: Vec::new(),
            exports: Vec::new(),
            traffic: None,
            counters: None,
            memory: Some(CoreMemory {
                buffers: PageBytes { huge, transparent: 16 << 20, small: 0 },
                drives: PageBytes { small: drives, ..PageBytes::default() },
            }),
            io_uring: None,
        };
        let said = memory(&[core(16 << 20, 0), core(16 << 20, 0)]);
        let buffers = "memory: buffers 32M on huge pages, 32M on transparent huge pages";
        assert_eq!(said.as_deref(), Some(buffers));
        let said = memory(&[core(0, 1 << 30)]).unwrap();
        assert_eq!(said, "memory: buffers 16M on transparent huge pages; drives 1G on small pages");
        assert_eq!(memory(&[CoreStatus { memory: None, ..core(0, 0) }]), None);
    }

    #[test]
    fn shares_are_told_to_a_tenth() {
        let shares = [(0, "0.0 %"), (2_999, "0.2 %"), (123_456, "12.3 %"), (1_000_000, "100.0 %")];
        shares.iter().for_each(|(ppm, said)| assert_eq!(percent(*ppm), *said));
    }
}
