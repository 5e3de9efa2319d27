//! Front ends: by which protocol a volume is offered, and where.

use std::path::{Path, PathBuf};

use ashlar_target::disk::PARTS_MAX;
use ashlar_target::vhost::QUEUES_MAX;
use serde::{Deserialize, Serialize};

use crate::api::export::{ExportCreate, ExportKind};
use crate::refusal::{Answer, Refusal};

const QUEUES_DEFAULT: u16 = QUEUES_MAX;

/// What is kept of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Front {
    VhostUserBlk { socket: PathBuf, queues: u16 },
}

impl Front {
    /// What `asked` means. `directory`: where sockets are made, unless told otherwise.
    pub fn of(asked: &ExportCreate, directory: &Path) -> Answer<Front> {
        let socket = || {
            let own = || directory.join(format!("{}.sock", asked.name));
            asked.socket.clone().unwrap_or_else(own)
        };
        match asked.kind {
            ExportKind::VhostUserBlk => {
                let queues = asked.queues.unwrap_or(QUEUES_DEFAULT);
                if !(1..=QUEUES_MAX).contains(&queues) {
                    let text = format!("an export cannot have {queues} queues");
                    return Err(Refusal::invalid(text).fix(format!("use 1 to {QUEUES_MAX}")));
                }
                Ok(Front::VhostUserBlk { socket: socket(), queues })
            }
        }
    }

    pub fn kind(&self) -> ExportKind {
        match self {
            Front::VhostUserBlk { .. } => ExportKind::VhostUserBlk,
        }
    }

    /// The Unix socket that initiators connect to.
    pub fn socket(&self) -> Option<&Path> {
        match self {
            Front::VhostUserBlk { socket, .. } => Some(socket),
        }
    }

    /// Most queues that an initiator may use.
    pub fn queues(&self) -> Option<u16> {
        match self {
            Front::VhostUserBlk { queues, .. } => Some(*queues),
        }
    }

    /// How many reactors can serve it at most.
    pub fn parts_max(&self) -> u16 {
        match self {
            Front::VhostUserBlk { queues, .. } => (*queues).min(PARTS_MAX),
        }
    }

    /// Where initiators find it.
    pub fn place(&self) -> String {
        match self {
            Front::VhostUserBlk { socket, .. } => socket.display().to_string(),
        }
    }

    /// Both cannot be at the same place.
    pub fn clashes_with(&self, other: &Front) -> bool {
        self.socket().is_some() && self.socket() == other.socket()
    }

    /// Options for QEMU that give the volume to a guest. Guest memory must be shared for
    /// vhost-user; `reconnect` lets the daemon be restarted under it.
    pub fn qemu(&self, name: &str) -> Option<String> {
        match self {
            Front::VhostUserBlk { socket, queues } => {
                let socket = socket.display().to_string().replace(',', ",,");
                Some(format!(
                    "-object memory-backend-memfd,id=mem,size=4G,share=on -numa node,memdev=mem \
                     -chardev socket,id={name},path={socket},reconnect=1 \
                     -device vhost-user-blk-pci,chardev={name},num-queues={queues}"
                ))
            }
        }
    }
}
