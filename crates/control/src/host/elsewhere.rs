//! What other hosts have, or had: drives that one uses are not overwritten, whoever agrees to it
//! here; and who was left at work before another had the array does not go on.
//!
//! A lease that moves while it is watched says so, as it does when an array is started; see
//! `raid/src/lease.rs`.

use ashlar_format::lease::Lease;
use ashlar_raid::lease::{BEAT_PERIOD, WATCH_BEATS, age, is_others, is_own, owner_name};
use uuid::Uuid;

use crate::catalog::KnownArray;
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

    /// With which epoch an array came here last; 0: it is not known.
    pub(super) fn since(&self, array: Uuid) -> u64 {
        self.look(|state| state.catalog.arrays.get(&array).map_or(0, |its| its.since))
    }

    /// Before a start: a daemon of this host may have been killed after it took the array, and
    /// before it could note that. Where that cannot be stored, guests that it left may be refused.
    pub(super) async fn note_taken(&self, array: Uuid) {
        let last = self.look(|state| state.catalog.arrays.get(&array).map(KnownArray::last_epoch));
        let Some(last) = last else { return };
        let lease = self.newest_lease(array).await.filter(|its| is_own(its, &self.lessee));
        if let Some(epoch) = lease.map(|its| its.epoch.get()).filter(|epoch| *epoch == last + 1) {
            let stored = self.record(|catalog| {
                catalog.arrays.get_mut(&array).into_iter().for_each(|its| its.taken = epoch);
            });
            stored.unwrap_or_else(|refusal| tracing::error!("{}", refusal.line()));
        }
    }

    /// Drives that cannot be read say nothing; a start will say so.
    pub(super) async fn newest_lease(&self, array: Uuid) -> Option<Lease> {
        let mut newest = None;
        for drive in self.drives_labelled(array) {
            let lease = self.lease_on(&drive).await.ok().flatten();
            newest = newest.into_iter().chain(lease).max_by_key(age);
        }
        newest
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

/// With which epoch an array came here that was started with this one. Each start has an epoch of
/// its own, wherever it is.
pub(super) fn came_with(before: Option<&KnownArray>, epoch: u64) -> u64 {
    let is_next = |its: &&KnownArray| its.since != 0 && epoch <= its.last_epoch() + 1;
    before.filter(is_next).map_or(epoch, |its| its.since)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_else_had_an_array_that_was_started_here_and_here_again() {
        for (taken, epoch, stays) in [
            (0, 8, true),
            // Another host's was in between.
            (0, 9, false),
            // A daemon of ours was killed right after it had taken it.
            (8, 9, true),
            (8, 10, false),
        ] {
            let known = KnownArray { epoch: 7, since: 3, taken, ..KnownArray::default() };
            let since = came_with(Some(&known), epoch);
            assert_eq!(since, if stays { 3 } else { epoch }, "{taken} {epoch}");
        }
        let unknown = KnownArray { epoch: 7, ..KnownArray::default() };
        assert_eq!((came_with(Some(&unknown), 8), came_with(None, 8)), (8, 8));
    }
}
