//! Spares, and members that come back: what `takeover` decides is done here.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use crate::api::Done;
use crate::api::array::{ArrayState, MemberState};
use crate::api::spare::{Spare, SpareAdd};
use crate::catalog::KnownSpare;
use crate::device::content::Content;
use crate::host::show::Snapshots;
use crate::host::{Attached, Host, PassedOver, Running, State};
use crate::refusal::{Answer, Refusal};
use crate::snapshot::{ArraySnapshot, MemberSnapshot};
use crate::takeover::{Away, Candidate, Decision, Needs, decide};

/// A spare that was refused.
const TRIED_AGAIN_AFTER: Duration = Duration::from_secs(60);

impl Host {
    pub async fn list_spares(&self) -> Vec<Spare> {
        self.spares_with(&self.snapshots().await)
    }

    pub(super) fn spares_with(&self, snapshots: &Snapshots) -> Vec<Spare> {
        let known = self.look(|state| state.catalog.spares.clone());
        let shown = known.iter().map(|(drive, spare)| self.spare_shown(drive, spare, snapshots));
        let mut spares: Vec<Spare> = shown.collect();
        spares.sort_by(|a, b| natord::compare(&a.drive, &b.drive));
        spares
    }

    fn spare_shown(&self, drive: &str, spare: &KnownSpare, snapshots: &Snapshots) -> Spare {
        let (attached, missing) = self.look(|state| {
            (state.drives.get(drive).cloned(), state.missing.get(drive).map(Refusal::line))
        });
        let unfit = attached.as_ref();
        let unfit = unfit.and_then(|its| self.unfit(spare.array, snapshots, drive, its));
        let passed_over = attached.as_ref().and_then(|drive| drive.passed_over.clone());
        let passed_over = passed_over.map(|its| its.why);
        Spare {
            drive: drive.to_owned(),
            array: spare.array.map(|array| self.array_name(array)),
            bytes: attached.as_ref().map(|drive| drive.bytes()),
            sector_bytes: attached.as_ref().map(|drive| drive.sector_bytes()),
            error: missing.or(passed_over).or(unfit.map(|refusal| refusal.line())),
        }
    }

    pub async fn add_spare(&self, request: SpareAdd) -> Answer<Spare> {
        let _change = self.begin().await?;
        let SpareAdd { drive, array, force } = request;
        let array = array.map(|name| self.array_uuid(&name)).transpose()?;
        if self.look(|state| state.catalog.spares.contains_key(&drive)) {
            return Err(Refusal::conflict(format!("drive {drive} is a spare already")).fix(
                format!("`ashlar spare remove {drive}` first, to keep it for another array"),
            ));
        }
        self.check_new_members(std::slice::from_ref(&drive), force).await?;
        let snapshots = self.snapshots().await;
        let attached = self.attached(&drive)?;
        self.unfit(array, &snapshots, &drive, &attached).map_or(Ok(()), Err)?;
        if attached.content != Content::Blank {
            // By force, or it would have been refused. It takes over blank, or not at all.
            self.wipe_drive(&drive).await?;
        }
        let spare = KnownSpare { array };
        self.record(|catalog| {
            catalog.spares.insert(drive.clone(), spare.clone());
        })?;
        self.give_another_chance(&drive);
        tracing::info!(drive, array = array.map(|uuid| self.array_name(uuid)), "spare added");
        Ok(self.spare_shown(&drive, &spare, &snapshots))
    }

    pub async fn remove_spare(&self, drive: &str) -> Answer<Done> {
        let _change = self.begin().await?;
        if !self.look(|state| state.catalog.spares.contains_key(drive)) {
            return Err(Refusal::unknown(format!("there is no spare {drive}"))
                .fix("`ashlar spare list` shows all"));
        }
        self.record(|catalog| {
            catalog.spares.remove(drive);
        })?;
        tracing::info!(drive, "spare removed");
        Ok(Done::default())
    }

    /// Notes since when members are away; the arrays that miss some.
    pub(super) fn note_absences(&self, arrays: &BTreeMap<Uuid, ArraySnapshot>) -> BTreeSet<Uuid> {
        let now = Instant::now();
        let away = |array: &ArraySnapshot| {
            let members = array.members.iter().filter(|member| is_away(member));
            members.map(|member| (array.uuid, member.index)).collect::<Vec<_>>()
        };
        let away: BTreeSet<(Uuid, u8)> = arrays.values().flat_map(away).collect();
        self.look(|state| {
            let State { away: known, arrays: running, .. } = state;
            // Of an array that does not answer just now nothing is known.
            known.retain(|place, _| {
                away.contains(place)
                    || !arrays.contains_key(&place.0) && running.contains_key(&place.0)
            });
            for place in &away {
                known.entry(*place).or_insert(now);
            }
        });
        away.into_iter().map(|(array, _)| array).collect()
    }

    /// What will be done about each member that is away.
    pub(super) fn plans(&self, array: &ArraySnapshot) -> BTreeMap<u8, Decision> {
        self.look(|state| decide(&needs(array), absences(state, array), candidates(state)))
    }

    /// Does what is due about the members of an array that are away; not while something else is
    /// changed.
    pub(super) async fn mend(&self, array: Uuid) {
        let Ok(_turn) = self.changes.try_lock() else { return };
        let running = self.look(|state| {
            let running = state.arrays.get(&array).copied();
            running.filter(|_| !state.stopping)
        });
        let Some(running) = running else { return };
        // As it is now that nobody else changes it.
        let Ok(snapshot) = self.snapshot(running).await else { return };
        for (index, decision) in self.plans(&snapshot) {
            let Some(member) = snapshot.members.iter().find(|its| its.index == index) else {
                continue;
            };
            let name = self.array_name(array);
            let (drive, done, what) = match decision {
                Decision::Leave | Decision::Wait { .. } => continue,
                Decision::Rejoin(drive) => {
                    let changed = || Refusal::conflict("it is not that member's drive any more");
                    let back = self.take_back(running, member).await;
                    let back = back.and_then(|back| back.map(|_| ()).ok_or_else(changed));
                    (drive, back, "its drive is back, and taken back")
                }
                Decision::TakeOver(spare) => {
                    let taken = self.take_over(running, index, &spare).await;
                    (spare, taken, "away for too long: a spare has taken its place")
                }
            };
            match done {
                Ok(()) => {
                    tracing::warn!(array = name, member = index, drive, "{what}");
                    self.try_others_again(array);
                }
                Err(refusal) => {
                    let why = refusal.line();
                    if self.pass_over(&drive, why.clone()) {
                        tracing::error!(array = name, member = index, drive, "not used: {why}");
                    }
                }
            }
            if let Err(refusal) = self.after_members_changed(array).await {
                tracing::error!(array = name, "{}", refusal.line());
            }
        }
    }

    async fn take_over(&self, running: Running, member: u8, spare: &str) -> Answer<()> {
        // It was blank when it was added; its name may lead to another drive by now.
        self.check_free(spare, false).await?;
        self.put_drive(running, member, spare, false).await?;
        self.record(|catalog| {
            catalog.spares.remove(spare);
        })
    }

    /// A spare is tried again after a while, if it is of use then; a drive that came back, when it
    /// is attached anew, or when a member was taken back or replaced. Returns whether that is news.
    fn pass_over(&self, drive: &str, why: String) -> bool {
        self.look(|state| {
            let Some(drive) = state.drives.get_mut(drive) else { return true };
            let is_news = drive.passed_over.as_ref().is_none_or(|before| before.why != why);
            drive.passed_over = Some(PassedOver { why, at: Instant::now() });
            is_news
        })
    }

    /// What was lacking when they were refused may be there now.
    fn try_others_again(&self, array: Uuid) {
        let drives = [self.drives_labelled(array), self.drives_of(array)].concat();
        drives.iter().for_each(|drive| self.give_another_chance(drive));
    }

    /// A drive that was passed over is tried again by itself.
    pub(super) fn give_another_chance(&self, drive: &str) {
        self.look(|state| {
            if let Some(drive) = state.drives.get_mut(drive) {
                drive.passed_over = None;
            }
        });
    }

    /// Spares that have become members are spares no more.
    pub(super) fn forget_used_spares(&self) -> Answer<()> {
        let used: Vec<String> = self.look(|state| {
            let spares = state.catalog.spares.keys();
            let used = spares.filter(|name| {
                state.drives.get(*name).is_some_and(|drive| drive.used_by.is_some())
            });
            used.cloned().collect()
        });
        if used.is_empty() {
            return Ok(());
        }
        self.record(|catalog| catalog.spares.retain(|name, _| !used.contains(name)))
    }
}

fn is_away(member: &MemberSnapshot) -> bool {
    !member.is_present() || member.state == MemberState::Stale
}

fn absences(state: &State, array: &ArraySnapshot) -> Vec<Away> {
    let now = Instant::now();
    let away = array.members.iter().filter(|member| is_away(member)).map(|member| {
        let since = state.away.get(&(array.uuid, member.index));
        let is_own = |content: &Content| {
            let label = content.label();
            label.is_some_and(|its| its.array == array.uuid && its.drive == member.drive_uuid)
        };
        let mut drives = state.drives.iter();
        // One of another host that was given up, and is there again, is still this member's; not
        // one that has failed in any other way: it would fail again.
        let is_free = |drive: &Attached| match drive.used_by {
            None => true,
            Some(user) => {
                let remote = drive.device().and_then(|device| device.remote());
                let given_up = remote.is_some_and(|drive| drive.report().was_given_up);
                given_up && !member.is_present() && user == (array.uuid, member.index)
            }
        };
        let returned = drives.find(|(_, drive)| {
            let is_lost = drive.device().is_some_and(|device| device.is_lost());
            let usable = !is_lost && drive.passed_over.is_none();
            usable && is_free(drive) && is_own(&drive.content)
        });
        Away {
            member: member.index,
            lacking: array.lacking(array.set_of(member.index)),
            is_needed: member.is_needed,
            time: since.map_or(Duration::ZERO, |since| now.duration_since(*since)),
            returned: returned.map(|(name, _)| name.clone()),
        }
    });
    away.collect()
}

fn needs(array: &ArraySnapshot) -> Needs {
    Needs {
        array: array.uuid,
        rebuildable: array.redundancy() > 0 && array.state == ArrayState::Degraded,
        member: array.needs,
        delay: array.spare_delay(),
    }
}

/// What kept a spare from being used may have been there for a moment only.
fn may_be_tried(passed_over: Option<&PassedOver>, now: Instant) -> bool {
    passed_over.is_none_or(|its| now.duration_since(its.at) >= TRIED_AGAIN_AFTER)
}

fn candidates(state: &State) -> Vec<Candidate> {
    let now = Instant::now();
    let ready = state.catalog.spares.iter().filter_map(|(name, spare)| {
        let drive = state.drives.get(name)?;
        let free = drive.used_by.is_none() && may_be_tried(drive.passed_over.as_ref(), now);
        free.then(|| Candidate {
            drive: name.clone(),
            array: spare.array,
            bytes: drive.bytes(),
            sector_bytes: drive.sector_bytes(),
        })
    });
    ready.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spare_that_was_refused_is_tried_again() {
        let at = Instant::now();
        let refused = PassedOver { why: "drive s0 does not answer".into(), at };
        let after = |seconds| may_be_tried(Some(&refused), at + Duration::from_secs(seconds));
        assert_eq!([0, 1, 59, 60, 3600].map(after), [false, false, false, true, true]);
        assert!(may_be_tried(None, at));
    }
}
