//! `ashlar spare …`

use clap::{Args, Subcommand};
use clap_complete::engine::ArgValueCandidates;

use crate::api::Done;
use crate::api::spare::{Spare, SpareAdd};
use crate::cli::complete;
use crate::cli::drive::with_notes;
use crate::cli::output::{Output, or_dash, rows, show, table};
use crate::client::{Client, path_of};
use crate::refusal::Answer;
use crate::size::Size;

#[derive(Subcommand)]
pub enum Command {
    /// Keep a drive for members that fail or go away
    Add(Add),
    /// All spares
    List,
    /// Keep a drive no longer; it stays attached
    Remove {
        /// Its name
        #[arg(add = ArgValueCandidates::new(complete::spares))]
        drive: String,
    },
}

#[derive(Args)]
pub struct Add {
    /// Name of an attached drive that is not in use
    #[arg(add = ArgValueCandidates::new(complete::unused_drives))]
    drive: String,
    /// Keep it for this array; left out: for whichever needs it first
    #[arg(long, add = ArgValueCandidates::new(complete::arrays))]
    array: Option<String>,
    /// Also if it carries data or a label: it is wiped
    #[arg(long)]
    force: bool,
}

pub async fn run(command: Command, client: &Client, output: Output) -> Answer<()> {
    match command {
        Command::Add(Add { drive, array, force }) => {
            let request = SpareAdd { drive, array, force };
            let spare: Spare = client.post("/v1/spares", &request).await?;
            show(output, &spare, |spare| {
                let array = spare.array.as_ref().map(|array| format!("array {array}"));
                let array = array.unwrap_or_else(|| "all arrays".to_owned());
                format!("drive {} is a spare for {array}", spare.drive)
            })
        }
        Command::List => {
            let spares: Vec<Spare> = client.get("/v1/spares").await?;
            show(output, &spares, |spares| spares_table(spares))
        }
        Command::Remove { drive } => {
            let done: Done = client.delete(&path_of("spares", &drive)).await?;
            show(output, &done, |done| {
                with_notes(&format!("drive {drive} is no spare any more"), &done.notes)
            })
        }
    }
}

pub fn spares_table(spares: &[Spare]) -> String {
    let mut shown = table(&["SPARE", "FOR", "SIZE>", "SECTOR>", "TROUBLE"]);
    for spare in spares {
        shown.add_row([
            spare.drive.clone(),
            spare.array.clone().unwrap_or_else(|| "all arrays".to_owned()),
            or_dash(spare.bytes.map(Size)),
            or_dash(spare.sector_bytes.map(|bytes| Size(bytes.into()))),
            or_dash(spare.error.as_ref()),
        ]);
    }
    rows(&shown, "no spares; `ashlar spare add DRIVE` keeps one")
}
