//! Arrays grow into what their drives have more by now.

use std::sync::Arc;

use uuid::Uuid;

use crate::api::array::ArrayGrown;
use crate::host::{Host, Medium, translate};
use crate::refusal::{Answer, Refusal};

impl Host {
    /// Looks how large the drives of an array are now, and uses what fits on all of them.
    pub async fn grow_array(&self, name: &str) -> Answer<ArrayGrown> {
        let _change = self.begin().await?;
        let running = self.running_array(name)?;
        let sizes = self.measure_members(running.uuid)?;
        let grown = self.on_array(running, async move |_, pool| {
            for member in pool.array().status().members {
                let size = sizes.iter().find(|(index, _)| *index == member.index.0);
                if let Some((drive, (_, bytes))) = member.drive.zip(size) {
                    drive.grow(*bytes);
                }
            }
            pool.array().grow().await
        });
        let grown = grown.await?.map_err(|error| translate::change(&error));
        // Labels may have been written in any case.
        self.after_members_changed(running.uuid).await?;
        let gained_bytes = grown?;
        tracing::info!(array = name, gained_bytes, "array grown");
        let array = self.show_array_by_uuid(running.uuid).await?;
        Ok(ArrayGrown { gained_bytes, array })
    }

    /// The members of an array and the bytes that their drives have now.
    fn measure_members(&self, array: Uuid) -> Answer<Vec<(u8, u64)>> {
        self.look(|state| {
            let mut sizes = Vec::new();
            for (name, drive) in &mut state.drives {
                let Some((_, member)) = drive.used_by.filter(|user| user.0 == array) else {
                    continue;
                };
                if let Medium::Device(device) = &mut drive.medium {
                    let grown = device.grown().map_err(|error| {
                        Refusal::failed(format!("the size of drive {name} is not known: {error}"))
                    })?;
                    *device = grown.map_or(device.clone(), Arc::new);
                }
                sizes.push((member, drive.bytes()));
            }
            Ok(sizes)
        })
    }
}
