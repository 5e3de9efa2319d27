//! What other hosts have, or had: drives that one uses are not overwritten, whoever agrees to it
//! here; and who was left at work before another had the array does not go on.
//!
//! A lease that moves while it is watched says so, as it does when an array is started; see
//! `raid/src/lease.rs`.

use ashlar_format::lease::Lease;
use ashlar_raid::lease::{self, BEAT_PERIOD, WATCH_BEATS, age, is_others, is_own, owner_name};
use uuid::Uuid;

use crate::catalog::{Catalog, KnownArray};
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
    /// before it could note that. Durable before the start has a lease of its own, which takes the
    /// place of that one. Where it cannot be stored, it holds until this daemon is killed; but what
    /// the next would believe wrongly keeps the array from its start.
    pub(super) async fn note_taken(&self, array: Uuid) -> Answer<()> {
        let known = self.look(|state| state.catalog.arrays.get(&array).cloned());
        let Some(known) = known else { return Ok(()) };
        let leases = self.leases(array).await;
        // Who cannot be asked may have been another host's.
        let taken = leases.map_or(0, |leases| taken(&known, &leases, &self.lessee));
        let note = |catalog: &mut Catalog| {
            catalog.arrays.get_mut(&array).into_iter().for_each(|its| its.taken = taken);
        };
        if taken != known.taken
            && let Err(refusal) = self.record(note)
        {
            if taken < known.taken {
                return Err(refusal);
            }
            tracing::error!("{}", refusal.line());
            self.look(|state| note(&mut state.catalog));
        }
        Ok(())
    }

    /// On the drives that carry the array's label.
    async fn leases(&self, array: Uuid) -> Answer<Vec<Lease>> {
        let mut leases = Vec::new();
        for drive in self.drives_labelled(array) {
            leases.extend(self.lease_of(array, &drive).await?);
        }
        Ok(leases)
    }

    /// Drives that cannot be read say nothing; a start will say so.
    pub(super) async fn newest_lease(&self, array: Uuid) -> Option<Lease> {
        let mut newest = None;
        for drive in self.drives_labelled(array) {
            let lease = self.lease_of(array, &drive).await.ok().flatten();
            newest = newest.into_iter().chain(lease).max_by_key(age);
        }
        newest
    }

    /// The newest lease of an array on a drive, if it still has that array's label.
    async fn lease_of(&self, array: Uuid, drive: &str) -> Answer<Option<Lease>> {
        let lease = self.lease_on(drive).await?;
        Ok(lease.filter(|its| its.array == *array.as_bytes()))
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

/// What a killed daemon of this host took after what the catalog knows, by the leases on the drives
/// that are here. 0: nothing, or another host may have had the array since.
///
/// A start has a larger epoch than all leases that it sees. So one of ours that is the next after
/// our last was taken from nobody, if no drive knows of another's: hosts that saw different drives
/// may have taken the same.
///
/// | drives say | we know | |
/// |---|---|---|
/// | 7 | 7 | nothing was taken |
/// | 8, ours, some still 7 | 7 | 8 |
/// | 9, ours | 7, taken 8 | 9: two were killed, one after the other |
/// | 9, ours | 7 | 0: whose was 8? |
/// | 8, ours; 8, given back | 7, or taken 8 | 0: we have not given it back |
fn taken(known: &KnownArray, leases: &[Lease], host: &lease::Host) -> u64 {
    let mut later = leases.iter().filter(|its| its.epoch.get() > known.epoch);
    if later.clone().any(|its| !is_own(its, host)) {
        return 0;
    }
    let next = known.last_epoch() + 1;
    if later.any(|its| its.epoch.get() == next) { next } else { known.taken }
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
    fn what_a_killed_daemon_took_is_told_from_what_others_had() {
        let us = lease::Host::new([1; 16], "here");
        let lease = |epoch: u64, host| {
            let mut lease = Lease::free([9; 16]);
            (lease.host, lease.epoch) = ([host; 16], epoch.into());
            lease
        };
        for (leases, noted, expected) in [
            (vec![lease(7, 1), lease(7, 1)], 0, 0),
            (vec![lease(7, 0)], 0, 0),
            (vec![lease(7, 1), lease(8, 1)], 0, 8),
            (vec![lease(8, 1)], 8, 8),
            (vec![lease(9, 1), lease(8, 1)], 8, 9),
            (vec![lease(9, 1)], 0, 0),
            (vec![lease(8, 2)], 0, 0),
            (vec![lease(8, 1), lease(8, 0)], 0, 0),
            (vec![lease(8, 1), lease(8, 0)], 8, 0),
            (vec![lease(9, 1), lease(8, 2)], 8, 0),
            // The drives that have it are not here.
            (vec![lease(7, 1)], 8, 8),
            (vec![], 8, 8),
        ] {
            let known = KnownArray { epoch: 7, taken: noted, ..KnownArray::default() };
            assert_eq!(taken(&known, &leases, &us), expected, "{noted} {leases:?}");
        }
    }

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
