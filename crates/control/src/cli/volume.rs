//! `ashlar volume …`

use clap::{Args, Subcommand};
use clap_complete::engine::ArgValueCandidates;

use crate::api::Done;
use crate::api::volume::{Volume, VolumeCreate, VolumeResize};
use crate::cli::complete;
use crate::cli::drive::with_notes;
use crate::cli::output::{Output, rows, show, table};
use crate::client::{Client, path_of};
use crate::refusal::Answer;
use crate::size::Size;

#[derive(Subcommand)]
pub enum Command {
    /// Make a volume, all zero
    Create(Create),
    /// Grow a volume, also while a guest uses it
    Resize {
        /// VOLUME, or ARRAY/VOLUME
        #[arg(add = ArgValueCandidates::new(complete::volumes))]
        name: String,
        /// The new size
        #[arg(long)]
        size: Size,
    },
    /// Delete a volume and its data
    Delete {
        /// VOLUME, or ARRAY/VOLUME
        #[arg(add = ArgValueCandidates::new(complete::volumes))]
        name: String,
    },
    /// All volumes of running arrays
    List,
    /// One volume
    Show {
        /// VOLUME, or ARRAY/VOLUME
        #[arg(add = ArgValueCandidates::new(complete::volumes))]
        name: String,
    },
}

#[derive(Args)]
pub struct Create {
    /// Name of the new volume
    name: String,
    /// Array that holds it
    #[arg(long, add = ArgValueCandidates::new(complete::arrays))]
    array: String,
    /// Such as 10G
    #[arg(long)]
    size: Size,
}

pub async fn run(command: Command, client: &Client, output: Output) -> Answer<()> {
    match command {
        Command::Create(Create { name, array, size }) => {
            let request = VolumeCreate { name, array, bytes: size.0 };
            let volume: Volume = client.post("/v1/volumes", &request).await?;
            show(output, &volume, |its| {
                format!("volume {} created: {} on array {}", its.name, Size(its.bytes), its.array)
            })
        }
        Command::Resize { name, size } => {
            let path = format!("{}/resize", path_of("volumes", &name));
            let volume: Volume = client.post(&path, &VolumeResize { bytes: size.0 }).await?;
            show(output, &volume, |its| format!("volume {} has {} now", its.name, Size(its.bytes)))
        }
        Command::Delete { name } => {
            let done: Done = client.delete(&path_of("volumes", &name)).await?;
            show(output, &done, |done| with_notes(&format!("volume {name} deleted"), &done.notes))
        }
        Command::List => {
            let volumes: Vec<Volume> = client.get("/v1/volumes").await?;
            show(output, &volumes, |volumes| volumes_table(volumes))
        }
        Command::Show { name } => {
            let volume: Volume = client.get(&path_of("volumes", &name)).await?;
            show(output, &volume, details)
        }
    }
}

pub fn volumes_table(volumes: &[Volume]) -> String {
    let mut shown = table(&["NAME", "ARRAY", "SIZE>", "EXPORTS"]);
    for volume in volumes {
        let exports =
            if volume.exports.is_empty() { "-".to_owned() } else { volume.exports.join(", ") };
        let size = Size(volume.bytes).to_string();
        shown.add_row([volume.name.clone(), volume.array.clone(), size, exports]);
    }
    rows(
        &shown,
        "no volumes on arrays that run; `ashlar volume create NAME --array ARRAY --size SIZE` \
         makes one",
    )
}

fn details(volume: &Volume) -> String {
    let exports =
        if volume.exports.is_empty() { "-".to_owned() } else { volume.exports.join(", ") };
    [
        format!("name     {}", volume.name),
        format!("uuid     {}", volume.uuid),
        format!("array    {}", volume.array),
        format!("size     {} ({} bytes)", Size(volume.bytes), volume.bytes),
        format!("exports  {exports}"),
    ]
    .join("\n")
}
