//! Arrays that are deleted: their drives become blank, those that are still theirs.

use uuid::Uuid;

use crate::api::Done;
use crate::api::array::ArrayState;
use crate::host::elsewhere::User;
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
        let user = match self.user_elsewhere(&free).await? {
            None => self.user_elsewhere(&own).await.unwrap_or_else(|refusal| {
                // A member that hangs keeps nobody from it.
                notes.push(refusal.error);
                None
            }),
            user => user,
        };
        if let Some(running) = running {
            self.delete_exports_of(uuid).await?;
            if let Err(refusal) = self.stop_running(running).await {
                notes.push(refusal.error);
            }
        }
        self.delete_exports_of(uuid).await?;
        if let Some(User { host, .. }) = &user {
            notes.push(format!(
                "array {name} is in use by {host} (its lease is alive): it is only forgotten here, \
                 and its drives are left as they are"
            ));
        }
        for drive in own.iter().chain(&free).filter(|_| user.is_none()) {
            if let Err(refusal) = self.wipe_member(uuid, drive).await {
                notes.push(refusal.error);
            }
        }
        self.record(|catalog| {
            catalog.arrays.remove(&uuid);
            catalog.spares.retain(|_, spare| spare.array != Some(uuid));
        })?;
        self.look(|state| state.unavailable.remove(&uuid));
        tracing::info!(array = name, "array deleted");
        Ok(Done { notes })
    }

    async fn check_deletable(
        &self,
        name: &str,
        running: Option<Running>,
        force: bool,
    ) -> Answer<()> {
        if force {
            return Ok(());
        }
        let Some(running) = running else {
            return Err(Refusal::conflict(format!(
                "array {name} does not run, so nobody knows whether it holds volumes"
            ))
            .fix(format!("start it first, or use `ashlar array delete {name} --force`")));
        };
        let snapshot = self.snapshot(running).await?;
        if snapshot.volumes.is_empty() {
            return Ok(());
        }
        let volumes: Vec<&str> = snapshot.volumes.iter().map(|v| v.name.as_str()).collect();
        let state = if snapshot.state == ArrayState::Failed { "failed " } else { "" };
        Err(Refusal::conflict(format!("{state}array {name} holds volumes: {}", volumes.join(", ")))
            .fix("delete them first, or use --force to lose them"))
    }

    /// Makes a drive blank, unless it is another array's by now.
    async fn wipe_member(&self, array: Uuid, drive: &str) -> Answer<()> {
        let content = self.probe_drive(drive).await?;
        match content.label() {
            Some(label) if label.array == array => self.wipe_drive(drive).await,
            Some(label) => {
                Err(Refusal::conflict(format!("drive {drive} is left as it is: it has {label}")))
            }
            None => Ok(()),
        }
    }
}
