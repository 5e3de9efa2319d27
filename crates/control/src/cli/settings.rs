//! Options of `ashlar array create` and `ashlar array set`.

use clap::Args;
use clap::builder::RangedU64ValueParser;

use crate::api::settings::{Policy, Settings, SettingsChange};
use crate::period::Period;
use crate::size::Size;

#[derive(Args, Clone, Copy)]
pub struct SettingsOptions {
    /// What is durable before a write is acknowledged; usual: journal for levels with parity
    /// and with --integrity, bitmap for mirrors, none for level 0
    #[arg(long, value_enum)]
    policy: Option<Policy>,
    /// Share of the drives' bandwidth for rebuild, resync and scrub, 1 to 100; usual: 30
    #[arg(long, value_name = "PERCENT", value_parser = percent(1))]
    rebuild_share: Option<u8>,
    /// Reads of a hundred that may also be worked out from other members when theirs is late, 0 to
    /// 100; usual: 0, none
    #[arg(long, value_name = "PERCENT", value_parser = percent(0))]
    hedge: Option<u8>,
    /// Writes up to this size are there as a whole after a crash, or not at all, under policy
    /// journal: 4K to 256K; usual: 64K
    #[arg(long, value_name = "SIZE")]
    atomic: Option<Size>,
    /// How long a member may be away before a spare takes its place, from 0; usual: 3m
    #[arg(long, value_name = "TIME")]
    spare_delay: Option<Period>,
    /// Time between the beginnings of two scrubs, such as 7d, or never; usual: 30d
    #[arg(long, value_name = "TIME", value_parser = scrub_period)]
    scrub_every: Option<Period>,
}

fn percent(least: u64) -> RangedU64ValueParser<u8> {
    RangedU64ValueParser::new().range(least..=100)
}

/// Zero seconds are never; nobody means them otherwise.
fn scrub_period(text: &str) -> Result<Period, String> {
    if text == "never" {
        return Ok(Period(0));
    }
    let no_zero = |period: &Period| period.0 > 0;
    let period = text.parse::<Period>().map_err(|error| format!("{error}, or never"))?;
    Some(period).filter(no_zero).ok_or_else(|| "write never for no scrubs".to_owned())
}

impl SettingsOptions {
    pub fn change(self) -> SettingsChange {
        // What is too large for the field is too large for the array, which says so.
        let bytes = |size: Size| u32::try_from(size.0).unwrap_or(u32::MAX);
        SettingsChange {
            policy: self.policy,
            rebuild_percent: self.rebuild_share,
            hedge_percent: self.hedge,
            atomic_bytes: self.atomic.map(bytes),
            spare_delay_s: self.spare_delay.map(|period| period.0),
            scrub_period_s: self.scrub_every.map(|period| period.0),
        }
    }
}

fn policy_name(policy: Policy) -> &'static str {
    match policy {
        Policy::Journal => "journal",
        Policy::Bitmap => "bitmap",
        Policy::None => "none",
    }
}

/// Lines of `array show`.
pub fn lines(settings: &Settings) -> Vec<String> {
    let Settings { policy, rebuild_percent, hedge_percent, atomic_bytes, .. } = *settings;
    let hedged = match hedge_percent {
        0 => "none".to_owned(),
        percent => format!("up to {percent} % of reads"),
    };
    let scrubs = match settings.scrub_period_s {
        0 => "by hand only".to_owned(),
        period_s => format!("every {}", Period(period_s)),
    };
    vec![
        format!("policy      {}", policy_name(policy)),
        format!("share       {rebuild_percent} % for rebuild, resync and scrub"),
        format!("hedge       {hedged}"),
        format!("atomic      {} a write", Size(atomic_bytes.into())),
        format!("spares      after {}", Period(settings.spare_delay_s)),
        format!("scrubs      {scrubs}"),
    ]
}
