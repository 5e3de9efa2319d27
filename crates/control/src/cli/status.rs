//! `ashlar status`

use std::time::Duration;

use clap::Args;

use crate::api::status as api;
use crate::cli::array::arrays_table;
use crate::cli::drive::drives_table;
use crate::cli::export::exports_table;
use crate::cli::output::{Output, duration, show};
use crate::cli::spare::spares_table;
use crate::cli::volume::volumes_table;
use crate::client::Client;
use crate::refusal::Answer;

#[derive(Args)]
pub struct Status {
    /// Wait until the daemon answers, at most this many seconds
    #[arg(long, value_name = "SECONDS")]
    wait_up: Option<u64>,
}

pub async fn run(status: Status, client: &Client, output: Output) -> Answer<()> {
    if let Some(seconds) = status.wait_up {
        client.wait_up(Duration::from_secs(seconds)).await?;
    }
    let status: api::Status = client.get("/v1/status").await?;
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
