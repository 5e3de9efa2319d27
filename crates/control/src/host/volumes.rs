//! Volumes: ranges of running arrays.

use ashlar_pool::error::PoolError;
use uuid::Uuid;

use crate::api::Done;
use crate::api::volume::{Volume, VolumeCreate, VolumeResize};
use crate::host::on_demand::disk;
use crate::host::show::Snapshots;
use crate::host::{Host, Running, translate};
use crate::name::check_name;
use crate::refusal::{Answer, Refusal};
use crate::snapshot::VolumeSnapshot;

impl Host {
    pub async fn list_volumes(&self) -> Vec<Volume> {
        self.volumes_with(&self.snapshots().await)
    }

    /// All volumes of running arrays. Arrays that do not answer are left out; their own entry
    /// says why.
    pub(super) fn volumes_with(&self, snapshots: &Snapshots) -> Vec<Volume> {
        let mut volumes: Vec<Volume> = snapshots
            .values()
            .flatten()
            .flat_map(|array| array.volumes.iter().map(|volume| self.shown(array.uuid, volume)))
            .collect();
        volumes.sort_by(|a, b| {
            natord::compare(&a.name, &b.name).then_with(|| natord::compare(&a.array, &b.array))
        });
        volumes
    }

    fn shown(&self, array: Uuid, volume: &VolumeSnapshot) -> Volume {
        Volume {
            name: volume.name.clone(),
            uuid: volume.uuid,
            array: self.array_name(array),
            bytes: volume.bytes,
            exports: self.exports_of_volume(array, &volume.name),
        }
    }

    pub async fn show_volume(&self, name: &str) -> Answer<Volume> {
        let (running, volume) = self.find_volume(name).await?;
        Ok(self.shown(running.uuid, &volume))
    }

    /// The volume called `name`, or `ARRAY/VOLUME` where two arrays have one of that name.
    pub(super) async fn find_volume(&self, name: &str) -> Answer<(Running, VolumeSnapshot)> {
        let (array, volume) = match name.split_once('/') {
            Some((array, volume)) => (Some(array), volume),
            None => (None, name),
        };
        let arrays = match array {
            Some(array) => vec![self.running_array(array)?],
            None => self.running(),
        };
        let mut found = Vec::new();
        for running in arrays {
            let snapshot = self.snapshot(running).await.map_err(|refusal| match array {
                Some(_) => refusal,
                // It may have a twin there.
                None => {
                    let its = self.array_name(running.uuid);
                    Refusal { error: format!("array {its}: {}", refusal.error), ..refusal }
                        .fix(format!("say ARRAY/{volume}, if it is of another array"))
                }
            })?;
            let of_this = snapshot.volumes.into_iter().filter(|known| known.name == volume);
            found.extend(of_this.map(|known| (running, known)));
        }
        match (found.pop(), found.pop()) {
            (Some(only), None) => Ok(only),
            (Some((one, _)), Some((other, _))) => {
                let (one, other) = (self.array_name(one.uuid), self.array_name(other.uuid));
                Err(Refusal::conflict(format!(
                    "arrays {one} and {other} both have a volume {name}"
                ))
                .fix(format!("say {one}/{name} or {other}/{name}")))
            }
            (None, _) => Err(self.no_volume(name)),
        }
    }

    /// Of arrays that do not run nobody knows the volumes, but for those that are exported.
    fn no_volume(&self, name: &str) -> Refusal {
        let exported = self.look(|state| {
            let mut exports = state.catalog.exports.values();
            let its =
                exports.find(|its| its.volume == name && !state.arrays.contains_key(&its.array));
            its.map(|its| its.array)
        });
        if let Some(array) = exported {
            let array = self.array_name(array);
            return Refusal::conflict(format!(
                "volume {name} is on array {array}, which does not run"
            ))
            .fix(format!("`ashlar array start {array}`"));
        }
        Refusal::unknown(format!("there is no volume {name}"))
            .fix("`ashlar volume list` shows all volumes of running arrays")
    }

    pub async fn create_volume(&self, request: VolumeCreate) -> Answer<Volume> {
        let _change = self.begin().await?;
        check_name("a volume", &request.name)?;
        let running = self.answering_array(&request.array).await?;
        if let Some(twin) = self.list_volumes().await.iter().find(|v| v.name == request.name) {
            return Err(Refusal::conflict(format!(
                "there is a volume {} already, on array {}",
                request.name, twin.array
            ))
            .fix("give it another name"));
        }
        let (name, bytes) = (request.name.clone(), request.bytes);
        let created = self.on_array(running, async move |_, pool| {
            let uuid = Uuid::new_v4().into_bytes();
            pool.create(uuid, &name, bytes).await.map(|_| ())
        });
        created.await?.map_err(|error| translate::pool(&error))?;
        tracing::info!(volume = request.name, array = request.array, bytes, "volume created");
        self.show_volume(&format!("{}/{}", request.array, request.name)).await
    }

    pub async fn resize_volume(&self, name: &str, request: VolumeResize) -> Answer<Volume> {
        let _change = self.begin().await?;
        let (running, volume) = self.find_volume(name).await?;
        let (plain, bytes) = (volume.name.clone(), request.bytes);
        let resized = self.on_array(running, async move |_, pool| {
            pool.resize(&plain, bytes).await?;
            Ok(pool.volume(&plain).map(|volume| disk(&volume)))
        });
        let resized: Result<_, PoolError> = resized.await?;
        if let Some(disk) = resized.map_err(|error| translate::pool(&error))? {
            self.tell_exports_of_resize(running.uuid, &volume.name, disk).await?;
        }
        tracing::info!(volume = volume.name, bytes, "volume resized");
        self.show_volume(name).await
    }

    pub async fn delete_volume(&self, name: &str) -> Answer<Done> {
        let _change = self.begin().await?;
        let (running, volume) = self.find_volume(name).await?;
        let exports = self.exports_of_volume(running.uuid, &volume.name);
        if let Some(export) = exports.first() {
            return Err(Refusal::conflict(format!(
                "volume {name} is exported, as {}",
                exports.join(", ")
            ))
            .fix(format!("ashlar export delete {export}")));
        }
        let plain = volume.name.clone();
        let deleted = self.on_array(running, async move |_, pool| pool.delete(&plain).await);
        deleted.await?.map_err(|error| translate::pool(&error))?;
        tracing::info!(volume = volume.name, "volume deleted");
        Ok(Done::default())
    }
}
