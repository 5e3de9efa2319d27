//! Arrays grow: into what their drives have more by now, or over more drives.

use std::sync::Arc;

use uuid::Uuid;

use crate::api::array::{ArrayGrow, ArrayGrown};
use crate::device::OpenDevice;
use crate::engine::plant;
use crate::host::drives::blocking;
use crate::host::{Host, Medium, Running, translate};
use crate::refusal::{Answer, Refusal};

impl Host {
    pub async fn grow_array(&self, name: &str, request: ArrayGrow) -> Answer<ArrayGrown> {
        let _change = self.begin().await?;
        let running = self.answering_array(name).await?;
        let gained_bytes = if request.add.is_empty() {
            self.use_larger_drives(running).await?
        } else {
            self.add_members(running, &request).await?
        };
        tracing::info!(array = name, gained_bytes, added = request.add.join(","), "array grown");
        let array = self.show_array_by_uuid(running.uuid).await?;
        Ok(ArrayGrown { gained_bytes, array })
    }

    /// Adds drives as members. Returns what is gained once everything is moved.
    async fn add_members(&self, running: Running, request: &ArrayGrow) -> Answer<u64> {
        self.check_new_members(&request.add, request.force).await?;
        for (index, name) in request.add.iter().enumerate() {
            if request.add[..index].contains(name) {
                return Err(Refusal::invalid(format!("drive {name} is named twice"))
                    .fix("name each drive once"));
            }
            if let Medium::Memory { home: Some(home), .. } = self.attached(name)?.medium
                && home.core != running.core
            {
                return Err(Refusal::conflict(format!(
                    "memory drive {name} lives on another core"
                ))
                .fix("detach and attach it again (that empties it)"));
            }
        }
        self.check_added(&self.snapshot(running).await?, &request.add)?;
        let blank = self.blank_drives(&request.add);
        let name = self.array_name(running.uuid);
        let seeds = self.seeds(&request.add).await?;
        let added = self.on_array(running, async move |reactor, pool| {
            let (drives, kept) = plant(&reactor, seeds);
            let drives =
                drives.into_iter().map(|drive| (Uuid::new_v4().into_bytes(), drive)).collect();
            let before = pool.array().capacity();
            let added = pool.array().add_members(drives).await;
            let gained = pool.array().layout().capacity() - before;
            (kept, added.map(|()| gained).map_err(|error| translate::change(&name, "grow", &error)))
        });
        let (kept, added) = added.await?;
        self.keep_memory(running.core, kept);
        // Also after an error: they may be members all the same.
        self.after_members_changed(running.uuid).await?;
        if added.is_err() {
            let free = |name: &String| self.attached(name).is_ok_and(|its| its.used_by.is_none());
            let left: Vec<String> = blank.into_iter().filter(free).collect();
            self.blank_again(&left).await;
        }
        added
    }

    /// Looks how large the drives of an array are now, and uses what fits on all of them.
    async fn use_larger_drives(&self, running: Running) -> Answer<u64> {
        let sizes = self.measure_members(running.uuid).await?;
        let grown = self.on_array(running, async move |_, pool| {
            for member in pool.array().status().members {
                let size = sizes.iter().find(|(index, _)| *index == member.index.0);
                if let Some((drive, (_, bytes))) = member.drive.zip(size) {
                    drive.grow(*bytes);
                }
            }
            pool.array().grow().await
        });
        let name = self.array_name(running.uuid);
        let grown = grown.await?.map_err(|error| translate::change(&name, "grow", &error));
        // Labels may have been written in any case.
        self.after_members_changed(running.uuid).await?;
        grown
    }

    /// The members of an array and the bytes that their drives have now.
    async fn measure_members(&self, array: Uuid) -> Answer<Vec<(u8, u64)>> {
        let members: Vec<(String, u8)> = self.look(|state| {
            let drives = state.drives.iter();
            let of_array = drives.filter_map(|(name, drive)| {
                let (_, member) = drive.used_by.filter(|user| user.0 == array)?;
                Some((name.clone(), member))
            });
            of_array.collect()
        });
        let mut sizes = Vec::new();
        for (name, member) in members {
            let drive = self.attached(&name)?;
            let bytes = match drive.device().cloned() {
                None => drive.bytes(),
                Some(device) => self.measure(&name, device).await?,
            };
            sizes.push((member, bytes));
        }
        Ok(sizes)
    }

    /// The bytes that a drive has now; from now on it is known to have them.
    async fn measure(&self, name: &str, device: Arc<OpenDevice>) -> Answer<u64> {
        let asked = device.clone();
        let grown = blocking(name, move || asked.grown()).await?.map_err(|error| {
            Refusal::failed(format!("the size of drive {name} is not known: {error}"))
        })?;
        let Some(grown) = grown.map(Arc::new) else { return Ok(device.limits.bytes) };
        let bytes = grown.limits.bytes;
        self.look(|state| {
            let its = state.drives.get_mut(name).map(|drive| &mut drive.medium);
            // Another may have its name by now.
            if let Some(Medium::Device(its)) = its
                && Arc::ptr_eq(its, &device)
            {
                *its = grown;
            }
        });
        Ok(bytes)
    }
}
