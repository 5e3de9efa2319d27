//! Members of a running array: pulled, replaced, taken back, scrubbed.

use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::error::ChangeError;
use uuid::Uuid;

use crate::api::array::{Array as Shown, ArrayReplace, ArrayScrub, MemberState, RebuildStarted};
use crate::device::content::Content;
use crate::engine::plant;
use crate::host::{Host, Medium, Running, translate};
use crate::refusal::{Answer, Refusal};
use crate::snapshot::{ArraySnapshot, MemberSnapshot};

impl Host {
    /// Takes a member's drive away from its array.
    pub(super) async fn pull(&self, array: Uuid, member: u8) -> Answer<()> {
        self.pull_that(array, move |_| Some(MemberIndex(member))).await
    }

    /// Takes a drive away from the array that has it, whatever else is being done there. False: no
    /// array has it.
    pub(super) async fn pull_drive(&self, drive: &str) -> Answer<bool> {
        let user = self.look(|state| state.drives.get(drive).and_then(|its| its.used_by));
        let Some((array, _)) = user else { return Ok(false) };
        let name = drive.to_owned();
        let has_it = move |array: &Array| {
            let is_it = |its: &Rc<Drive>| its.name() == name;
            let members = array.status().members;
            let index = members.iter().position(|its| its.drive.as_ref().is_some_and(is_it));
            index.map(MemberIndex::new)
        };
        self.pull_that(array, has_it).await.map(|()| true)
    }

    async fn pull_that(
        &self,
        array: Uuid,
        which: impl FnOnce(&Array) -> Option<MemberIndex> + Send + 'static,
    ) -> Answer<()> {
        let running = self.look(|state| state.arrays.get(&array).copied());
        let Some(running) = running else { return Ok(()) };
        let name = self.array_name(array);
        let pulled = self.on_array(running, async move |_, pool| {
            let array = pool.array();
            which(array).map_or(Ok(()), |member| array.pull_member(member))
        });
        pulled.await?.map_err(|error| translate::change(&name, "show", &error))
    }

    pub async fn replace_member(&self, name: &str, request: ArrayReplace) -> Answer<Shown> {
        let _change = self.begin().await?;
        let running = self.running_array(name)?;
        let snapshot = self.snapshot(running).await?;
        let member = self.member_meant(name, &snapshot, &request)?;
        let in_use = member.is_present() && member.state != MemberState::Stale;
        if in_use && !request.force {
            return Err(Refusal::conflict(format!(
                "member {} of array {name} is in use: its drive is well",
                member.index
            ))
            .fix("--force pulls it; until the rebuild is done the array has less redundancy"));
        }
        // The drive that was this member may come back without --force: nothing on it is lost
        // that the array does not have.
        let content = self.probe_drive(&request.new).await?;
        self.check_cut(&format!("drive {}", request.new), &content)?;
        let comes_back = content.label().is_some_and(|label| label.drive == member.drive_uuid);
        self.check_new_members(std::slice::from_ref(&request.new), request.force || comes_back)
            .await?;
        if !comes_back {
            self.check_replacement(&snapshot, &request.new)?;
        }
        if member.is_needed && !comes_back {
            let index = MemberIndex(member.index);
            return Err(translate::change(name, "replace", &ChangeError::MemberNeeded(index)));
        }
        if in_use {
            self.pull(running.uuid, member.index).await?;
            tracing::warn!(array = name, member = member.index, "drive pulled to be replaced");
        }
        if let Err(refusal) =
            self.put_drive(running, member.index, &request.new, request.force).await
        {
            if in_use && let Err(worse) = self.take_back(running, member).await {
                tracing::error!(array = name, "the old drive is not taken back: {}", worse.error);
            }
            self.after_members_changed(running.uuid).await?;
            return Err(refusal);
        }
        self.after_members_changed(running.uuid).await?;
        tracing::info!(array = name, member = member.index, drive = request.new, "member replaced");
        self.show_array_by_uuid(running.uuid).await
    }

    /// The member that a replacement is for.
    fn member_meant<'a>(
        &self,
        array: &str,
        snapshot: &'a ArraySnapshot,
        request: &ArrayReplace,
    ) -> Answer<&'a MemberSnapshot> {
        let find = |index: u8| snapshot.members.iter().find(|member| member.index == index);
        let (index, what) = match (request.member, &request.old) {
            (Some(index), None) => (Some(index), format!("member {index}")),
            (None, Some(old)) => (self.member_of(snapshot, old), format!("member on drive {old}")),
            (Some(_), Some(_)) | (None, None) => {
                return Err(Refusal::invalid("say which member gets the new drive")
                    .fix("use either --member or --old"));
            }
        };
        index.and_then(find).ok_or_else(|| {
            Refusal::unknown(format!("array {array} has no {what}"))
                .fix(format!("`ashlar array show {array}` lists its members"))
        })
    }

    /// The member whose drive is, or was last, called `drive`, or has this uuid.
    fn member_of(&self, snapshot: &ArraySnapshot, drive: &str) -> Option<u8> {
        let (attached, last) = self.look(|state| {
            let attached = state.drives.get(drive).and_then(|drive| drive.used_by);
            let known = state.catalog.arrays.get(&snapshot.uuid);
            let mut last = known.into_iter().flat_map(|known| &known.drives);
            (attached, last.find(|(_, name)| *name == drive).map(|(index, _)| *index))
        });
        let now = attached.filter(|(array, _)| *array == snapshot.uuid).map(|(_, index)| index);
        now.or(last).or_else(|| {
            let uuid = Uuid::try_parse(drive).ok()?;
            snapshot.members.iter().find(|m| m.drive_uuid == uuid).map(|member| member.index)
        })
    }

    /// Gives a member its drive, on the array's reactor. A drive that is labelled gets a new uuid,
    /// so that nothing that it carried before can be taken for the array's. `overwrite`: also the
    /// member's own that was used elsewhere meanwhile.
    pub(super) async fn put_drive(
        &self,
        running: Running,
        member: u8,
        drive: &str,
        overwrite: bool,
    ) -> Answer<()> {
        if let Medium::Memory { home: Some(home), .. } = self.attached(drive)?.medium
            && home.core != running.core
        {
            return Err(Refusal::conflict(format!("memory drive {drive} lives on another core"))
                .fix("detach and attach it again (that empties it)"));
        }
        let seeds = self.seeds(&[drive.to_owned()]).await?;
        let name = self.array_name(running.uuid);
        let put = self.on_array(running, async move |reactor, pool| {
            let (mut drives, kept) = plant(&reactor, seeds);
            let drive = drives.pop().expect("one seed, one drive");
            let uuid = Uuid::new_v4().into_bytes();
            let (array, member) = (pool.array(), MemberIndex(member));
            let result = match overwrite {
                true => array.replace_member(member, drive, uuid).await,
                false => array.return_member(member, drive, uuid).await,
            };
            (kept, result.map_err(|error| translate::change(&name, "replace", &error)))
        });
        let (kept, result) = put.await?;
        self.keep_memory(running.core, kept);
        if result.is_err() {
            // The array may hold the drive all the same, as a stale member.
            self.after_members_changed(running.uuid).await?;
        }
        result
    }

    /// Brings notes and catalog up to date with the members of an array.
    pub(super) async fn after_members_changed(&self, array: Uuid) -> Answer<()> {
        let running = self.look(|state| state.arrays.get(&array).copied());
        let Some(running) = running else { return Ok(()) };
        let snapshot = self.snapshot(running).await?;
        self.note_members(&snapshot);
        self.refresh_contents(running.uuid).await;
        self.record_snapshot(&snapshot)
    }

    /// Gives every absent member its own drive back, if that is attached, and takes up all rebuilds
    /// that can run.
    pub async fn rebuild_array(&self, name: &str) -> Answer<RebuildStarted> {
        let _change = self.begin().await?;
        let running = self.running_array(name)?;
        let before = self.snapshot(running).await?;
        let (mut members, notes, refused) = self.take_all_back(running, name, &before).await;
        members.extend(self.take_up_rebuilds(running, &before).await?);
        self.after_members_changed(running.uuid).await?;
        let array = self.show_array_by_uuid(running.uuid).await?;
        let rebuilding = array.members.iter().any(|its| its.state == MemberState::Rebuilding);
        if members.is_empty() && !rebuilding && !notes.is_empty() {
            let several = || {
                Refusal::conflict(format!("nothing of array {name} can be rebuilt now"))
                    .fix(notes.join("; "))
            };
            return Err(refused.filter(|_| notes.len() == 1).unwrap_or_else(several));
        }
        Ok(RebuildStarted { members, notes, array })
    }

    /// Takes back all members that were away and whose drives are there: which they are, what to
    /// know of the others, and why one of them was refused.
    async fn take_all_back(
        &self,
        running: Running,
        name: &str,
        before: &ArraySnapshot,
    ) -> (Vec<u8>, Vec<String>, Option<Refusal>) {
        let mut taken = Vec::new();
        let mut away: Vec<_> = before.members.iter().filter(|its| !its.is_present()).collect();
        loop {
            let (mut notes, mut refused, mut left) = (Vec::new(), None, Vec::new());
            let count = taken.len();
            for member in away {
                let index = member.index;
                match self.take_back(running, member).await {
                    Ok(Some(drive)) => {
                        tracing::info!(array = name, member = index, drive, "member taken back");
                        taken.push(index);
                        continue;
                    }
                    Ok(None) if member.is_needed => notes.push(format!(
                        "member {index} has no drive, and what it had no other member has: attach \
                         it again"
                    )),
                    Ok(None) => notes.push(format!(
                        "member {index} has no drive: attach it again, or use `ashlar array \
                         replace {name} --member {index} --new DRIVE`"
                    )),
                    Err(refusal) => {
                        notes.push(format!("member {index}: {}", refusal.line()));
                        refused.get_or_insert(refusal);
                    }
                }
                left.push(member);
            }
            // One that is back may be what others lacked.
            if taken.len() == count || left.is_empty() {
                return (taken, notes, refused);
            }
            away = left;
        }
    }

    /// Starts the rebuild of members that missed something and whose drive answers; those members.
    async fn take_up_rebuilds(&self, running: Running, before: &ArraySnapshot) -> Answer<Vec<u8>> {
        let waiting = |member: &&MemberSnapshot| match member.state {
            MemberState::Trusted => false,
            MemberState::Stale => member.is_present(),
            MemberState::Rebuilding => member.is_present() && before.rebuild.is_none(),
        };
        let members: Vec<u8> = before.members.iter().filter(waiting).map(|m| m.index).collect();
        if members.is_empty() {
            return Ok(members);
        }
        let started = self.on_array(running, async move |_, pool| {
            pool.array().rebuild(|| Uuid::new_v4().into_bytes()).await
        });
        let name = self.array_name(running.uuid);
        started.await?.map_err(|error| translate::change(&name, "rebuild", &error))?;
        Ok(members)
    }

    /// Puts the drive that was this member back, if it is attached; its name then.
    pub(super) async fn take_back(
        &self,
        running: Running,
        member: &MemberSnapshot,
    ) -> Answer<Option<String>> {
        let own = |content: &Content| {
            let label = content.label();
            label.is_some_and(|its| its.drive == member.drive_uuid && its.array == running.uuid)
        };
        let found = self.look(|state| {
            let found = state.drives.iter().find(|(_, drive)| {
                let user = drive.used_by;
                own(&drive.content) && user.is_none_or(|user| user == (running.uuid, member.index))
            });
            found.map(|(name, _)| name.clone())
        });
        let Some(drive) = found else { return Ok(None) };
        // Answers, and is still what it was?
        let content = self.probe_drive(&drive).await?;
        if !own(&content) {
            return Ok(None);
        }
        self.check_cut(&format!("drive {drive}"), &content)?;
        self.put_drive(running, member.index, &drive, false).await?;
        Ok(Some(drive))
    }

    pub async fn scrub_array(&self, name: &str, request: ArrayScrub) -> Answer<Shown> {
        let _change = self.begin().await?;
        let running = self.answering_array(name).await?;
        let ArrayScrub { repair, stop } = request;
        let done = self.on_array(running, async move |_, pool| match stop {
            true => pool.array().stop_scrub(),
            false => pool.array().start_scrub(repair),
        });
        done.await?.map_err(|error| translate::change(name, "scrub", &error))?;
        let what = if stop { "scrub stopped" } else { "scrub started" };
        tracing::info!(array = name, repair, "{what}");
        self.show_array_by_uuid(running.uuid).await
    }
}
