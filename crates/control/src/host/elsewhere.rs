//! What other hosts have, or had: drives that one uses are not overwritten, whoever agrees to it
//! here; and who was left at work before another had the array does not go on.
//!
//! A lease that moves while it is watched says so, as it does when an array is started; see
//! `raid/src/lease.rs`.

use std::collections::BTreeMap;

use ashlar_format::lease::Lease;
use ashlar_raid::lease::{self, BEAT_PERIOD, WATCH_BEATS, age, is_others, is_own, owner_name};
use ashlar_reactor::join::join_all;
use uuid::Uuid;

use crate::catalog::{Catalog, KnownArray};
use crate::device::OpenDevice;
use crate::host::drives::blocking;
use crate::host::{Host, Medium};
use crate::refusal::{Answer, Refusal};
use crate::survey::{self, Copies, Flaw};

/// Leases of one array are ordered by it.
pub(super) type Age = (u64, u64);

/// A drive and the host that uses it.
pub(super) struct User {
    pub(super) drive: String,
    pub(super) host: String,
}

/// What is seen of other hosts on drives.
#[derive(Default)]
pub(super) struct Watched {
    pub(super) user: Option<User>,
    /// On which drives there are leases of hosts that are not seen to live.
    pub(super) still: BTreeMap<String, Age>,
    /// Drives that do not answer, and so say nothing.
    pub(super) silent: BTreeMap<String, Refusal>,
    /// The largest epoch of our own leases.
    own_epoch: u64,
}

/// Whose a drive is just before it is made blank.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// Ours, or nobody's.
    None,
    /// It cannot be told.
    Unknown {
        why: String,
    },
    Others {
        host: String,
    },
}

impl Host {
    /// Refuses drives that another host uses.
    pub(super) async fn check_unused_elsewhere(&self, drives: &[String]) -> Answer<()> {
        let Some(User { drive, host }) = self.user_elsewhere(drives).await? else { return Ok(()) };
        Err(Refusal::conflict(format!("drive {drive} is in use by {host} (its lease is alive)"))
            .fix("delete or stop the array there first, or use another drive"))
    }

    /// Another host that uses one of these drives; see [`Host::watch_leases`].
    async fn user_elsewhere(&self, drives: &[String]) -> Answer<Option<User>> {
        let Watched { user, silent, .. } = self.watch_leases(drives).await;
        match (user, silent.into_values().next()) {
            (None, Some(refusal)) => Err(refusal),
            (user, _) => Ok(user),
        }
    }

    /// Looks for other hosts that use these drives. Takes [`WATCH_BEATS`] periods if one has them
    /// and is not seen to live.
    pub(super) async fn watch_leases(&self, drives: &[String]) -> Watched {
        let mut its = Watched::default();
        let leases = join_all(drives.iter().map(|drive| self.lease_on(drive))).await;
        for (drive, lease) in drives.iter().zip(leases) {
            its.note(drive, lease, &self.lessee);
        }
        for _ in 0..WATCH_BEATS {
            if its.still.is_empty() || its.user.is_some() {
                break;
            }
            tokio::time::sleep(BEAT_PERIOD).await;
            let drives: Vec<String> = its.still.keys().cloned().collect();
            for drive in drives {
                let lease = self.lease_on(&drive).await;
                its.note(&drive, lease, &self.lessee);
            }
        }
        its
    }

    /// Whose a drive is now, of which nobody was seen to have it; see [`claim`].
    pub(super) async fn claim_on(&self, drive: &str, still: Option<Age>) -> Claim {
        let Ok(attached) = self.attached(drive) else { return Claim::None };
        let Medium::Device(device) = attached.medium else { return Claim::None };
        let read = move || leases(&device).map_or(Ok(None), only);
        let found = blocking(drive, read).await.unwrap_or_else(|refusal| Err(refusal.error));
        claim(found, still, &self.lessee)
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
        blocking(drive, move || leases(&device)?.newest.map(|lease| *lease)).await
    }
}

impl Watched {
    /// Another host's lease on a drive of an array that runs here, from before it came here: ours
    /// is not on members that are not believed. Any other is a taker's.
    pub(super) fn older_than_ours(&self, drive: &str) -> Option<Age> {
        self.still.get(drive).copied().filter(|(epoch, _)| *epoch < self.own_epoch)
    }

    /// What is on a drive now; an older lease of the same host is known.
    fn note(&mut self, drive: &str, found: Answer<Option<Lease>>, us: &lease::Host) {
        let drive = drive.to_owned();
        let lease = match found {
            Ok(lease) => {
                let own = lease.as_ref().filter(|lease| is_own(lease, us));
                self.own_epoch = own.map_or(0, |own| own.epoch.get()).max(self.own_epoch);
                lease.filter(|lease| is_others(Some(lease), us))
            }
            Err(refusal) => return drop(self.silent.insert(drive, refusal)),
        };
        let Some(lease) = lease else { return };
        let before = self.still.insert(drive.clone(), age(&lease));
        if before.is_some_and(|before| age(&lease) > before) {
            self.user = Some(User { drive, host: owner_name(&lease) });
        }
    }
}

/// All copies of the lease on a drive, of the array that its label names. `None`: it has no label.
fn leases(device: &OpenDevice) -> Option<Copies<Lease>> {
    let label = survey::read_label(device.medium()).newest?;
    let mut leases = survey::read_lease(device.medium(), &label);
    leases.newest = leases.newest.filter(|lease| lease.array == label.array);
    Some(leases)
}

/// The newest lease, if none that may be newer cannot be read.
fn only(leases: Copies<Lease>) -> Result<Option<Lease>, String> {
    let is_unreadable = |flaw: &&Flaw| matches!(flaw, Flaw::Unreadable(_));
    let mut flaws = leases.copies.iter().filter_map(|copy| copy.found.as_ref().err());
    match flaws.find(is_unreadable) {
        Some(flaw) => Err(format!("its lease {flaw}")),
        None => Ok(leases.newest.map(|lease| *lease)),
    }
}

/// Whose a drive is that was ours until now, or on which another host's lease stood still while it
/// was watched.
///
/// | on it | stood still | |
/// |---|---|---|
/// | none, ours, or given back | | nobody's |
/// | another's | the same | nobody's: that host is gone |
/// | another's | an older one, or none | that host's: it took the array meanwhile |
/// | cannot be read | | unknown |
fn claim(found: Result<Option<Lease>, String>, still: Option<Age>, us: &lease::Host) -> Claim {
    match found {
        Err(why) => Claim::Unknown { why },
        Ok(Some(lease)) if is_others(Some(&lease), us) && Some(age(&lease)) != still => {
            Claim::Others { host: owner_name(&lease) }
        }
        Ok(_) => Claim::None,
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
    fn a_drive_is_nobodys_only_if_that_can_be_told() {
        let us = lease::Host::new([1; 16], "here");
        let lease = |host, age: Age| {
            let mut lease = Lease::free([9; 16]);
            lease.host = [host; 16];
            (lease.epoch, lease.beat) = (age.0.into(), age.1.into());
            Ok(Some(lease))
        };
        let others = || Claim::Others { host: "another host".to_owned() };
        let why = || "it does not answer".to_owned();
        for (found, still, expected) in [
            (Ok(None), None, Claim::None),
            (lease(1, (7, 3)), None, Claim::None),
            (lease(0, (7, 3)), None, Claim::None),
            // It was ours until now.
            (lease(2, (8, 3)), None, others()),
            (lease(2, (7, 3)), Some((7, 3)), Claim::None),
            (lease(2, (7, 4)), Some((7, 3)), others()),
            (lease(3, (8, 1)), Some((7, 3)), others()),
            (Err(why()), None, Claim::Unknown { why: why() }),
            (Err(why()), Some((7, 3)), Claim::Unknown { why: why() }),
        ] {
            let shown = format!("{found:?} {still:?}");
            assert_eq!(claim(found, still, &us), expected, "{shown}");
        }
    }

    #[test]
    fn who_had_an_array_before_us_does_not_take_it() {
        let us = lease::Host::new([1; 16], "here");
        let mut watched = Watched::default();
        for (drive, host, epoch) in [("ours", 1, 7), ("old", 2, 6), ("same", 2, 7), ("new", 2, 8)] {
            let mut lease = Lease::free([9; 16]);
            (lease.host, lease.epoch) = ([host; 16], u64::into(epoch));
            watched.note(drive, Ok(Some(lease)), &us);
        }
        let seen = ["ours", "old", "same", "new"].map(|drive| watched.older_than_ours(drive));
        assert_eq!(seen, [None, Some((6, 0)), None, None]);
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
