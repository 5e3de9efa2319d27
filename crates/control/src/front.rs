//! Front ends: by which protocol a volume is offered, and where.

use std::net::SocketAddr;
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
    VhostUserBlk {
        socket: PathBuf,
        queues: u16,
    },
    /// By one way at least.
    Nbd {
        socket: Option<PathBuf>,
        listen: Option<SocketAddr>,
    },
    Fuse {
        file: PathBuf,
    },
}

impl Front {
    /// What `asked` means. `directory`: where sockets are made, unless told otherwise.
    pub fn of(asked: &ExportCreate, directory: &Path) -> Answer<Front> {
        check_options(asked)?;
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
            ExportKind::Nbd => {
                if asked.listen.is_some_and(|address| address.port() == 0) {
                    let text = "an export cannot listen at port 0";
                    return Err(Refusal::invalid(text).fix("name a port; NBD's own is 10809"));
                }
                let is_by_tcp = asked.listen.is_some() && asked.socket.is_none();
                let socket = (!is_by_tcp).then(socket);
                Ok(Front::Nbd { socket, listen: asked.listen })
            }
            ExportKind::Fuse => {
                let file = asked.file.clone().filter(|file| file.is_absolute());
                let none = || Refusal::invalid("a file needs a place of its own");
                let fix = "name one with --path, where no file is yet, or an empty one";
                Ok(Front::Fuse { file: file.ok_or_else(|| none().fix(fix))? })
            }
        }
    }

    pub fn kind(&self) -> ExportKind {
        match self {
            Front::VhostUserBlk { .. } => ExportKind::VhostUserBlk,
            Front::Nbd { .. } => ExportKind::Nbd,
            Front::Fuse { .. } => ExportKind::Fuse,
        }
    }

    /// The Unix socket that initiators connect to.
    pub fn socket(&self) -> Option<&Path> {
        match self {
            Front::VhostUserBlk { socket, .. } => Some(socket),
            Front::Nbd { socket, .. } => socket.as_deref(),
            Front::Fuse { .. } => None,
        }
    }

    /// Most queues that an initiator may use.
    pub fn queues(&self) -> Option<u16> {
        match self {
            Front::VhostUserBlk { queues, .. } => Some(*queues),
            Front::Nbd { .. } | Front::Fuse { .. } => None,
        }
    }

    /// How many reactors can serve it at most.
    pub fn parts_max(&self) -> u16 {
        match self {
            Front::VhostUserBlk { queues, .. } => *queues,
            Front::Nbd { .. } => PARTS_MAX,
            // Writes of less than a sector must not meet on two.
            Front::Fuse { .. } => 1,
        }
    }

    /// Where initiators find it; `name`: of the export.
    pub fn place(&self, name: &str) -> String {
        match self {
            Front::VhostUserBlk { socket, .. } => socket.display().to_string(),
            Front::Nbd { socket, listen } => {
                let socket = socket.as_ref().map(|its| its.display());
                let unix = socket.map(|its| format!("nbd+unix:///{name}?socket={its}"));
                let tcp = listen.map(|its| format!("nbd://{its}/{name}"));
                unix.into_iter().chain(tcp).collect::<Vec<_>>().join(" ")
            }
            Front::Fuse { file } => file.display().to_string(),
        }
    }

    /// Where both would have to be, and only one can.
    pub fn clash_with(&self, other: &Front) -> Option<String> {
        let path = self.path().filter(|its| other.path() == Some(its));
        let address = self.listen().filter(|its| other.listen() == Some(*its));
        let path = path.map(|its| its.display().to_string());
        path.or_else(|| address.map(|its| its.to_string()))
    }

    fn listen(&self) -> Option<SocketAddr> {
        match self {
            Front::VhostUserBlk { .. } | Front::Fuse { .. } => None,
            Front::Nbd { listen, .. } => *listen,
        }
    }

    /// What it makes in the file system.
    fn path(&self) -> Option<&Path> {
        match self {
            Front::VhostUserBlk { .. } | Front::Nbd { .. } => self.socket(),
            Front::Fuse { file } => Some(file),
        }
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
            Front::Nbd { socket, listen } => {
                let server = match (socket, listen) {
                    (Some(socket), _) => {
                        let socket = socket.display().to_string().replace(',', ",,");
                        format!("server.type=unix,server.path={socket}")
                    }
                    (None, Some(its)) => {
                        let (host, port) = (its.ip(), its.port());
                        format!("server.type=inet,server.host={host},server.port={port}")
                    }
                    (None, None) => return None,
                };
                Some(format!(
                    "-blockdev driver=nbd,node-name={name},{server},export={name},discard=unmap,\
                     reconnect-delay=60 -device virtio-blk-pci,drive={name}"
                ))
            }
            // A guest has a better way.
            Front::Fuse { .. } => None,
        }
    }
}

/// Nothing that is asked for is passed over.
fn check_options(asked: &ExportCreate) -> Answer<()> {
    let refuse = |text: &str, fix: &str| Err(Refusal::invalid(text).fix(fix));
    match asked.kind {
        ExportKind::VhostUserBlk | ExportKind::Fuse if asked.listen.is_some() => {
            refuse("only an export by NBD listens at an address", "leave --listen out")
        }
        ExportKind::Nbd if asked.queues.is_some() => {
            refuse("clients of NBD use as many connections as they like", "leave --queues out")
        }
        ExportKind::Fuse if asked.queues.is_some() => {
            refuse("a file has a queue for each CPU", "leave --queues out")
        }
        ExportKind::Fuse if asked.socket.is_some() => {
            refuse("a file has no socket", "give its path as \"file\"")
        }
        ExportKind::VhostUserBlk | ExportKind::Nbd if asked.file.is_some() => {
            refuse("a socket is no file", "give its path as \"socket\"")
        }
        ExportKind::VhostUserBlk | ExportKind::Nbd | ExportKind::Fuse => Ok(()),
    }
}
