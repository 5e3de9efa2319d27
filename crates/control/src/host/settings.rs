//! What an operator has set of an array.

use ashlar_format::array_superblock as format;
use ashlar_raid::error::ChangeError;
use ashlar_raid::settings as raid;
use ashlar_raid::status::ArrayStatus;

use crate::api::array::Array as Shown;
use crate::api::settings::{Policy, SettingsChange};
use crate::host::{Host, translate};
use crate::refusal::{Answer, Refusal};
use crate::snapshot::atomic_bytes;

impl Host {
    pub async fn set_array(&self, name: &str, change: SettingsChange) -> Answer<Shown> {
        let _change = self.begin().await?;
        let running = self.answering_array(name).await?;
        let wanted = self.on_array(running, async move |_, pool| {
            // What is refused changes nothing.
            let policy = change.policy.map(stored_policy);
            policy.map_or(Ok(()), |policy| pool.array().check_policy(policy))?;
            let status = pool.array().status();
            Ok((status.policy, atomic_bytes(&status), atomic_bytes(&after(status, &change)?)))
        });
        let refused = |error| translate::change(name, "set", &error);
        let (policy, before, after) = wanted.await?.map_err(refused)?;
        // Initiators hear of less before less holds, and of more once it does.
        self.tell_exports_what_is_atomic(running, before.min(after)).await?;
        let set = self.on_array(running, async move |_, pool| {
            pool.array().set_settings(beside_policy(&change)).await?;
            match change.policy {
                Some(policy) => pool.array().set_policy(stored_policy(policy)).await,
                None => Ok(()),
            }
        });
        let set = set.await?.map_err(refused);
        let kept = self.on_array(running, async |_, pool| {
            let status = pool.array().status();
            (status.policy, atomic_bytes(&status))
        });
        let (kept, now) = kept.await?;
        let holds = if set.is_ok() { now } else { now.min(before) };
        self.tell_exports_what_is_atomic(running, holds).await?;
        set.map_err(|refusal| {
            let all_the_same = if kept == policy { "" } else { "; it is set all the same" };
            Refusal { error: refusal.error + all_the_same, ..refusal }
        })?;
        tracing::info!(array = name, "array set: {}", shown(&change));
        self.show_array_by_uuid(running.uuid).await
    }
}

/// `policy "journal", rebuild_percent 50`
fn shown(change: &SettingsChange) -> String {
    let fields = serde_json::to_value(change).unwrap_or_default();
    let fields = fields.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    let set: Vec<String> = fields.map(|(name, value)| format!("{name} {value}")).collect();
    if set.is_empty() { "nothing".to_owned() } else { set.join(", ") }
}

/// What the array will say of itself once that is set.
fn after(status: ArrayStatus, change: &SettingsChange) -> Result<ArrayStatus, ChangeError> {
    let settings = status.settings.changed(beside_policy(change), status.needs.sector_bytes);
    Ok(ArrayStatus {
        policy: change.policy.map_or(status.policy, stored_policy),
        settings: settings.map_err(ChangeError::Spec)?,
        ..status
    })
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
