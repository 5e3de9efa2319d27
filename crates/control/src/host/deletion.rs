//! Arrays that are deleted: their drives become blank, those that are still theirs.

use ashlar_reactor::join::join_all;
use uuid::Uuid;

use crate::api::Done;
use crate::api::array::ArrayState;
use crate::host::elsewhere::{Age, Claim, User};
use crate::host::{Host, Running};
use crate::refusal::{Answer, Refusal};

impl Host {
    pub async fn delete_array(&self, name: &str, force: bool) -> Answer<Done> {
        let _change = self.begin().await?;
        let uuid = self.array_uuid(name)?;
        let running = self.look(|state| state.arrays.get(&uuid).copied());
        self.check_deletable(name, running, force).await?;
        let mut notes = Vec::new();
        self.probe_free_drives().await;
        let (own, free) = (self.drives_of(uuid), self.drives_labelled(uuid));
        let away = self.drives_away(uuid);
        let watched = self.watch_leases(&[own.as_slice(), &free].concat()).await;
        let silent = free.iter().find_map(|drive| Some((drive, watched.silent.get(drive)?)));
        if let Some((drive, refusal)) = silent.filter(|_| watched.user.is_none()) {
            return Err(refusal.clone().fix(format!(
                "`ashlar drive detach {drive} --force`, then delete the array: that drive keeps \
                 its label"
            )));
        }
        if let Some(running) = running {
            notes.extend(self.delete_exports_of(uuid).await?);
            if let Err(refusal) = self.stop_running(running).await {
                notes.push(refusal.error);
            }
        }
        notes.extend(self.delete_exports_of(uuid).await?);
        let own = own.into_iter().map(|drive| {
            let still = watched.older_than_ours(&drive);
            (drive, still)
        });
        let free = free.into_iter().map(|drive| {
            let still = watched.still.get(&drive).copied();
            (drive, still)
        });
        if let Some(User { host, .. }) = &watched.user {
            notes.push(format!(
                "array {name} is in use by {host} (its lease is alive): it is only forgotten here, \
                 and its drives are left as they are"
            ));
        } else {
            let all = own.chain(free).partition(|(drive, _)| watched.silent.contains_key(drive));
            let (silent, rest): (Vec<_>, Vec<_>) = all;
            let silent = silent.iter().map(|(drive, _)| left(drive, "it does not answer").error);
            notes.extend(silent);
            notes.extend(self.wipe_members(uuid, rest).await);
            notes.extend(still_carry(&away));
        }
        self.record(|catalog| {
            catalog.arrays.remove(&uuid);
            catalog.spares.retain(|_, spare| spare.array != Some(uuid));
        })?;
        self.look(|state| state.unavailable.remove(&uuid));
        tracing::info!(array = name, "array deleted");
        Ok(Done { notes })
    }

    /// Names of drives that members had last and that are not attached, by another name neither.
    fn drives_away(&self, uuid: Uuid) -> Vec<String> {
        self.look(|state| {
            let known = state.catalog.arrays.get(&uuid).map(|its| &its.drives);
            let is_here = |index: u8| {
                let mut labels = state.drives.values().filter_map(|its| its.content.label());
                labels.any(|its| its.array == uuid && its.member == u32::from(index))
            };
            // Another may have its name by now.
            let is_used = |name: &String| {
                let user = state.drives.get(name).and_then(|drive| drive.used_by);
                user.is_some_and(|(array, _)| array == uuid)
            };
            let is_away = |(index, name): &(&u8, &String)| !is_used(name) && !is_here(**index);
            let away = known.into_iter().flatten().filter(is_away);
            away.map(|(_, name)| name.clone()).collect()
        })
    }

    async fn check_deletable(
        &self,
        name: &str,
        running: Option<Running>,
        force: bool,
    ) -> Answer<()> {
        let Some(running) = running else {
            if force {
                return Ok(());
            }
            return Err(Refusal::conflict(format!(
                "array {name} does not run, so nobody knows whether it holds volumes"
            ))
            .fix(format!("start it first, or use `ashlar array delete {name} --force`")));
        };
        // Also by force: who waited for a reactor that hangs would keep all others from changes.
        let snapshot = self.snapshot(running).await?;
        if force || snapshot.volumes.is_empty() {
            return Ok(());
        }
        let volumes: Vec<&str> = snapshot.volumes.iter().map(|v| v.name.as_str()).collect();
        let state = if snapshot.state == ArrayState::Failed { "failed " } else { "" };
        // Whoever uses one would lose it under way.
        let used = self.check_exports_unused(name, running.uuid).await.err();
        let used = used.map(|refusal| format!("; {}", refusal.error)).unwrap_or_default();
        let volumes = volumes.join(", ");
        Err(Refusal::conflict(format!("{state}array {name} holds volumes: {volumes}{used}"))
            .fix("delete them first, or use --force to lose them"))
    }

    /// Makes drives blank; what is to be said of those that are left. With each, another host's
    /// lease that was seen to stand still on it.
    async fn wipe_members(&self, array: Uuid, drives: Vec<(String, Option<Age>)>) -> Vec<String> {
        let mut notes = Vec::new();
        let claims = join_all(drives.iter().map(|(drive, still)| self.claim_on(drive, *still)));
        let taker = |claim| match claim {
            Claim::Others { host } => Some(host),
            Claim::None | Claim::Unknown { .. } => None,
        };
        // It has all of the array, also where its lease is not yet.
        let mut taken = claims.await.into_iter().find_map(taker);
        for (drive, still) in drives {
            if taken.is_none() {
                match self.wipe_member(array, &drive, still).await {
                    Ok(host) => taken = host,
                    Err(refusal) => notes.push(refusal.error),
                }
            }
            if let Some(host) = &taken {
                notes.push(left(&drive, &format!("{host} has taken the array")).error);
            }
        }
        notes
    }

    /// Makes a drive blank, unless it is another array's by now, or may be another host's: which
    /// one has taken it.
    async fn wipe_member(
        &self,
        array: Uuid,
        drive: &str,
        still: Option<Age>,
    ) -> Answer<Option<String>> {
        let content = self.probe_drive(drive).await;
        match content.map_err(|refusal| left(drive, &refusal.error))?.label() {
            Some(label) if label.array == array => {}
            Some(label) => return Err(left(drive, &format!("it has {label}"))),
            None => return Ok(None),
        }
        match self.claim_on(drive, still).await {
            Claim::None => self.wipe_drive(drive).await.map(|()| None),
            Claim::Unknown { why } => Err(left(drive, &why)),
            Claim::Others { host } => Ok(Some(host)),
        }
    }
}

/// Else an array that was deleted would come back without a word.
fn still_carry(away: &[String]) -> Option<String> {
    let which = match away {
        [] => return None,
        [one] => format!("drive {one} was"),
        many => format!("drives {} were", many.join(", ")),
    };
    Some(format!(
        "{which} not attached, and not made blank: once attached, `ashlar array start --scan` \
         finds the array there; `ashlar array create`, `ashlar array replace` and `ashlar spare \
         add` take such a drive with --force"
    ))
}

fn left(drive: &str, why: &str) -> Refusal {
    Refusal::conflict(format!("drive {drive} is left as it is: {why}"))
}
