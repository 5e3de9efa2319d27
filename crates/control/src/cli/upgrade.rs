//! `ashlar upgrade`

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};

use crate::api::upgrade::{UpgradeRequest, Upgrades};
use crate::cli::output::{Output, show};
use crate::client::Client;
use crate::refusal::{Answer, Refusal};

/// For the new program to come up; guests wait only a part of it.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(50);

#[derive(Args)]
pub struct Upgrade {
    /// The program; left out: the file that the daemon was started from, as it is now
    #[arg(long, value_name = "PATH", value_hint = ValueHint::ExecutablePath)]
    binary: Option<PathBuf>,
    /// Also if network block devices or files (FUSE) are in use: their users get I/O errors
    #[arg(long)]
    force: bool,
}

pub async fn run(upgrade: Upgrade, client: &Client, output: Output) -> Answer<()> {
    let absolute = |path: PathBuf| {
        std::path::absolute(&path)
            .map_err(|error| Refusal::invalid(format!("{}: {error}", path.display())))
    };
    let binary = upgrade.binary.map(absolute).transpose()?;
    let before: Upgrades =
        client.post("/v1/upgrade", &UpgradeRequest { binary, force: upgrade.force }).await?;
    let after = tokio::time::timeout(PATIENCE, wait(client, before.count)).await.map_err(|_| {
        Refusal::failed("no new program has taken over so far").fix("see the daemon's log")
    })?;
    if after.count < before.count {
        let text = "the new program has ended, and the daemon was started anew: who used NVMe/TCP, \
                    NBD or files was cut off";
        return Err(Refusal::failed(text).fix("see the daemon's log"));
    }
    if let Some(error) = after.error {
        return Err(Refusal::failed(error).fix("the daemon goes on as it was"));
    }
    show(output, &after, |after| {
        let paused = after.paused_ms.unwrap_or(0);
        format!("upgraded to ashlar {}; guests waited for {paused} ms", after.version)
    })
}

/// Until one more has taken over; it does not answer meanwhile.
async fn wait(client: &Client, count: u32) -> Upgrades {
    loop {
        if let Ok(now) = client.get::<Upgrades>("/v1/upgrade").await
            && now.count != count
        {
            return now;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
