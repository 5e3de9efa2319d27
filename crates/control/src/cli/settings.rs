//! Options of `ashlar array create` and `ashlar array set`.

use clap::Args;

use crate::api::settings::{Policy, Settings, SettingsChange};

#[derive(Args, Clone, Copy)]
pub struct SettingsOptions {
    /// What is durable before a write is acknowledged; usual: journal for levels with parity,
    /// bitmap for mirrors, none for level 0
    #[arg(long, value_enum)]
    policy: Option<Policy>,
}

impl SettingsOptions {
    pub fn change(self) -> SettingsChange {
        SettingsChange { policy: self.policy }
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
    vec![format!("policy      {}", policy_name(settings.policy))]
}
