//! Drives that another host uses: whoever agrees to it here, they are not overwritten.
//!
//! A lease that moves while it is watched says so, as it does when an array is started; see
//! `raid/src/lease.rs`.

use ashlar_format::lease::Lease;
use ashlar_raid::lease::{BEAT_PERIOD, WATCH_BEATS, age, is_others, owner_name};

use crate::host::drives::blocking;
use crate::host::{Host, Medium};
use crate::refusal::{Answer, Refusal};
use crate::survey;

/// A drive and the host that uses it.
pub(super) struct User {
    pub(super) drive: String,
    pub(super) host: String,
}

impl Host {
    /// Refuses drives that another host uses.
    pub(super) async fn check_unused_elsewhere(&self, drives: &[String]) -> Answer<()> {
        let Some(User { drive, host }) = self.user_elsewhere(drives).await? else { return Ok(()) };
        Err(Refusal::conflict(format!("drive {drive} is in use by {host} (its lease is alive)"))
            .fix("delete or stop the array there first, or use another drive"))
    }

    /// Another host that uses one of these drives. Takes [`WATCH_BEATS`] periods if one has them
    /// and is not seen to live.
    pub(super) async fn user_elsewhere(&self, drives: &[String]) -> Answer<Option<User>> {
        let mut watched = Vec::new();
        for drive in drives {
            let lease = self.lease_on(drive).await?;
            if let Some(lease) = lease.filter(|lease| is_others(Some(lease), &self.lessee)) {
                watched.push((drive, age(&lease)));
            }
        }
        for _ in 0..WATCH_BEATS {
            if watched.is_empty() {
                break;
            }
            tokio::time::sleep(BEAT_PERIOD).await;
            for (drive, before) in &watched {
                let Some(now) = self.lease_on(drive).await? else { continue };
                if age(&now) > *before && is_others(Some(&now), &self.lessee) {
                    let user = User { drive: (*drive).clone(), host: owner_name(&now) };
                    return Ok(Some(user));
                }
            }
        }
        Ok(None)
    }

    /// The newest lease on a drive, of the array that its label names.
    pub(super) async fn lease_on(&self, drive: &str) -> Answer<Option<Lease>> {
        let Medium::Device(device) = self.attached(drive)?.medium else { return Ok(None) };
        blocking(drive, move || {
            let label = survey::read_label(device.medium()).newest?;
            let lease = *survey::read_lease(device.medium(), &label).newest?;
            (lease.array == label.array).then_some(lease)
        })
        .await
    }
}
