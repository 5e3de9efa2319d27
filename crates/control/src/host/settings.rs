//! What an operator has set of an array.

use ashlar_format::array_superblock as format;
use ashlar_raid::settings as raid;

use crate::api::array::Array as Shown;
use crate::api::settings::{Policy, SettingsChange};
use crate::host::{Host, translate};
use crate::refusal::Answer;

impl Host {
    pub async fn set_array(&self, name: &str, change: SettingsChange) -> Answer<Shown> {
        let _change = self.begin().await?;
        let running = self.running_array(name)?;
        let set = self.on_array(running, async move |_, pool| {
            let policy = change.policy.map(stored_policy);
            // What is refused changes nothing.
            policy.map_or(Ok(()), |policy| pool.array().check_policy(policy))?;
            pool.array().set_settings(beside_policy(&change)).await?;
            match policy {
                Some(policy) => pool.array().set_policy(policy).await,
                None => Ok(()),
            }
        });
        set.await?.map_err(|error| translate::change(name, "set", &error))?;
        tracing::info!(array = name, ?change, "array set");
        self.tell_exports_of_settings(running).await?;
        self.show_array_by_uuid(running.uuid).await
    }
}

pub(super) fn beside_policy(change: &SettingsChange) -> raid::SettingsChange {
    raid::SettingsChange {
        rebuild_percent: change.rebuild_percent,
        hedge_percent: change.hedge_percent,
        atomic_bytes: change.atomic_bytes,
        spare_delay_s: change.spare_delay_s,
        scrub_period_s: change.scrub_period_s,
    }
}

pub fn stored_policy(policy: Policy) -> format::Policy {
    match policy {
        Policy::Journal => format::Policy::Journal,
        Policy::Bitmap => format::Policy::Bitmap,
        Policy::None => format::Policy::None,
    }
}
