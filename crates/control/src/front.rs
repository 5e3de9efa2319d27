//! Front ends: by which protocol a volume is offered, and where.

pub mod nvme;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use ashlar_target::disk::PARTS_MAX;
use ashlar_target::ublk;
use ashlar_target::vhost::QUEUES_MAX;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::access::SocketAccess;
use crate::api::export::{ExportCreate, ExportKind, NvmeNamespace};
use crate::refusal::{Answer, Refusal};
use crate::secret::KeptSecrets;

/// Most bytes of the name of a node in QEMU, which is a disk here.
const NODE_BYTES_MAX: usize = 31;

/// What is kept of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Front {
    VhostUserBlk {
        socket: PathBuf,
        queues: u16,
        #[serde(default, skip_serializing_if = "SocketAccess::is_usual")]
        access: SocketAccess,
    },
    /// One namespace of a subsystem.
    NvmeTcp {
        listen: SocketAddr,
        nqn: String,
        nsid: u32,
        /// None: any.
        #[serde(default)]
        hosts: Vec<String>,
        /// Of some of them.
        #[serde(default, skip_serializing_if = "KeptSecrets::is_empty")]
        secrets: KeptSecrets,
        queues: u16,
    },
    /// By one way at least.
    Nbd {
        socket: Option<PathBuf>,
        listen: Option<SocketAddr>,
        /// To the socket.
        #[serde(default, skip_serializing_if = "SocketAccess::is_usual")]
        access: SocketAccess,
    },
    Fuse {
        file: PathBuf,
    },
    /// The number is kept: after a crash the kernel has the device still.
    Ublk {
        device: u32,
        block_bytes: u32,
        queues: u16,
    },
}

/// A volume, and how it is offered.
pub type Offered = (Uuid, Front);

impl Front {
    /// What `asked` means, for this volume and beside other exports. `directory`: where sockets are
    /// made, unless told otherwise.
    pub fn of(
        asked: &ExportCreate,
        directory: &Path,
        volume: Uuid,
        others: &[Offered],
    ) -> Answer<Front> {
        check_options(asked)?;
        let socket = || {
            let own = || directory.join(format!("{}.sock", asked.name));
            asked.socket.clone().unwrap_or_else(own)
        };
        let access = asked.socket_access.clone();
        let front = match asked.kind {
            ExportKind::VhostUserBlk => {
                let queues = queues(asked, QUEUES_MAX)?;
                Front::VhostUserBlk { socket: socket(), queues, access }
            }
            ExportKind::NvmeTcp => nvme::front(asked, volume, others)?,
            ExportKind::Nbd => {
                let is_by_tcp = asked.listen.is_some() && asked.socket.is_none();
                let socket = (!is_by_tcp).then(socket);
                Front::Nbd { socket, listen: asked.listen, access }
            }
            ExportKind::Fuse => {
                let file = asked.file.clone().filter(|file| file.is_absolute());
                let none = || Refusal::invalid("a file needs a place of its own");
                let fix = "name one with --path, where no file is yet, or an empty one";
                Front::Fuse { file: file.ok_or_else(|| none().fix(fix))? }
            }
            ExportKind::Ublk => Front::Ublk {
                device: device(asked.device, others)?,
                block_bytes: block_bytes(asked.block_bytes)?,
                queues: queues(asked, ublk::QUEUES_MAX)?,
            },
        };
        match front.access().is_some() || asked.socket_access.is_usual() {
            true => Ok(front),
            false => Err(front.no_socket()),
        }
    }

    pub fn kind(&self) -> ExportKind {
        match self {
            Front::VhostUserBlk { .. } => ExportKind::VhostUserBlk,
            Front::NvmeTcp { .. } => ExportKind::NvmeTcp,
            Front::Nbd { .. } => ExportKind::Nbd,
            Front::Fuse { .. } => ExportKind::Fuse,
            Front::Ublk { .. } => ExportKind::Ublk,
        }
    }

    /// Whether what it makes is there without a daemon, too.
    pub fn outlives_daemon(&self) -> bool {
        matches!(self, Front::Ublk { .. })
    }

    /// Whether its users lose it when another program takes the place of this one. (NVMe/TCP hosts
    /// connect anew by themselves.)
    pub fn breaks_at_upgrade(&self) -> bool {
        matches!(self, Front::Nbd { .. } | Front::Fuse { .. })
    }

    /// The Unix socket that initiators connect to.
    pub fn socket(&self) -> Option<&Path> {
        match self {
            Front::VhostUserBlk { socket, .. } => Some(socket),
            Front::Nbd { socket, .. } => socket.as_deref(),
            Front::NvmeTcp { .. } | Front::Fuse { .. } | Front::Ublk { .. } => None,
        }
    }

    /// Who may connect to that socket; `None`: it has none.
    pub fn access(&self) -> Option<&SocketAccess> {
        match self {
            Front::VhostUserBlk { access, .. } | Front::Nbd { socket: Some(_), access, .. } => {
                Some(access)
            }
            Front::Nbd { socket: None, .. }
            | Front::NvmeTcp { .. }
            | Front::Fuse { .. }
            | Front::Ublk { .. } => None,
        }
    }

    /// The same.
    pub fn access_mut(&mut self) -> Option<&mut SocketAccess> {
        match self {
            Front::VhostUserBlk { access, .. } | Front::Nbd { socket: Some(_), access, .. } => {
                Some(access)
            }
            Front::Nbd { socket: None, .. }
            | Front::NvmeTcp { .. }
            | Front::Fuse { .. }
            | Front::Ublk { .. } => None,
        }
    }

    /// Why nobody can be let in to its socket.
    pub fn no_socket(&self) -> Refusal {
        let by = if self.listen().is_some() { " at an address" } else { "" };
        let kind = self.kind().name();
        Refusal::invalid(format!("an export by {kind}{by} has no Unix socket"))
            .fix("leave --socket-user, --socket-group and --socket-mode out")
    }

    /// Most queues that an initiator may use.
    pub fn queues(&self) -> Option<u16> {
        match self {
            Front::VhostUserBlk { queues, .. }
            | Front::NvmeTcp { queues, .. }
            | Front::Ublk { queues, .. } => Some(*queues),
            Front::Nbd { .. } | Front::Fuse { .. } => None,
        }
    }

    /// How many reactors can serve it at most.
    pub fn parts_max(&self) -> u16 {
        match self {
            Front::VhostUserBlk { queues, .. }
            | Front::NvmeTcp { queues, .. }
            | Front::Ublk { queues, .. } => (*queues).min(PARTS_MAX),
            Front::Nbd { .. } => PARTS_MAX,
            // Writes of less than a sector must not meet on two.
            Front::Fuse { .. } => 1,
        }
    }

    /// Where initiators find it, for people; `name`: of the export.
    pub fn place(&self, name: &str) -> String {
        self.places(name).join(" ")
    }

    /// The same: each place on its own.
    pub fn places(&self, name: &str) -> Vec<String> {
        match self {
            Front::VhostUserBlk { socket, .. } => vec![socket.display().to_string()],
            Front::NvmeTcp { listen, nqn, nsid, .. } => {
                vec![format!("nvme-tcp://{listen}/{nqn}?nsid={nsid}")]
            }
            Front::Nbd { socket, listen, .. } => {
                let socket = socket.as_ref().map(|its| its.display());
                let unix = socket.map(|its| format!("nbd+unix:///{name}?socket={its}"));
                let tcp = listen.map(|its| format!("nbd://{its}/{name}"));
                unix.into_iter().chain(tcp).collect()
            }
            Front::Fuse { file } => vec![file.display().to_string()],
            Front::Ublk { device, .. } => vec![ublk::path(*device).display().to_string()],
        }
    }

    /// Where both would have to be, and only one can.
    pub fn clash_with(&self, other: &Front) -> Option<String> {
        if let (
            Front::NvmeTcp { listen, nqn, nsid, .. },
            Front::NvmeTcp { listen: at, nqn: its, nsid: id, .. },
        ) = (self, other)
        {
            // Exports share a port, and a subsystem there, but not a namespace of that.
            let is_one = listen == at && nqn == its && nsid == id;
            return is_one.then(|| format!("namespace {id} of {nqn} at {at}"));
        }
        let path = self.path().filter(|its| other.path().as_ref() == Some(its));
        let address = self.listen().filter(|its| other.listen() == Some(*its));
        let path = path.map(|its| its.display().to_string());
        path.or_else(|| address.map(|its| its.to_string()))
    }

    fn listen(&self) -> Option<SocketAddr> {
        match self {
            Front::VhostUserBlk { .. } | Front::Fuse { .. } | Front::Ublk { .. } => None,
            Front::NvmeTcp { listen, .. } => Some(*listen),
            Front::Nbd { listen, .. } => *listen,
        }
    }

    /// What it makes in the file system.
    fn path(&self) -> Option<PathBuf> {
        match self {
            Front::VhostUserBlk { .. } | Front::NvmeTcp { .. } | Front::Nbd { .. } => {
                self.socket().map(Path::to_owned)
            }
            Front::Fuse { file } => Some(file.clone()),
            Front::Ublk { device, .. } => Some(ublk::path(*device)),
        }
    }

    /// Of which subsystem it is a namespace, if of any.
    pub fn subsystem(&self) -> Option<&str> {
        match self {
            Front::NvmeTcp { nqn, .. } => Some(nqn),
            Front::VhostUserBlk { .. }
            | Front::Nbd { .. }
            | Front::Fuse { .. }
            | Front::Ublk { .. } => None,
        }
    }

    /// As NVMe hosts find it.
    pub fn nvme(&self) -> Option<NvmeNamespace> {
        let Front::NvmeTcp { listen, nqn, nsid, hosts, secrets, .. } = self else { return None };
        let address = reached_at(*listen);
        Some(NvmeNamespace {
            nqn: nqn.clone(),
            nsid: *nsid,
            listen: *listen,
            hosts: hosts.clone(),
            hosts_with_secret: secrets.hosts.keys().cloned().collect(),
            controller_secret: secrets.controller.is_some(),
            connect: format!(
                "nvme connect -t tcp -a {address} -s {} -n {nqn}{}",
                listen.port(),
                match (secrets.hosts.is_empty(), &secrets.controller) {
                    (true, _) => "",
                    (false, None) => " --dhchap-secret=\"$(cat FILE)\"",
                    (false, Some(_)) =>
                        " --dhchap-secret=\"$(cat FILE)\" \
                         --dhchap-ctrl-secret=\"$(cat CONTROLLER-FILE)\"",
                }
            ),
        })
    }

    /// What initiators see as the serial number, where it is not the volume's.
    pub fn serial(&self) -> Option<String> {
        self.subsystem().map(ashlar_target::nvme_tcp::serial)
    }

    /// Options for QEMU that give the volume to a guest. Guest memory must be shared for
    /// vhost-user; `reconnect` lets the daemon be restarted under it.
    pub fn qemu(&self, name: &str) -> Option<String> {
        let id = in_qemu(name);
        match self {
            Front::VhostUserBlk { socket, queues, .. } => {
                let socket = in_option(socket);
                Some(format!(
                    "-m 4G -object memory-backend-memfd,id=mem,size=4G,share=on \
                     -numa node,memdev=mem -chardev socket,id={id},path={socket},reconnect=1 \
                     -device vhost-user-blk-pci,chardev={id},num-queues={queues}"
                ))
            }
            Front::Nbd { socket, listen, .. } => {
                let server = match (socket, listen) {
                    (Some(socket), _) => {
                        format!("server.type=unix,server.path={}", in_option(socket))
                    }
                    (None, Some(its)) => {
                        let (host, port) = (reached_at(*its), its.port());
                        format!("server.type=inet,server.host={host},server.port={port}")
                    }
                    (None, None) => return None,
                };
                Some(format!(
                    "-blockdev driver=nbd,node-name={id},{server},export={name},discard=unmap,\
                     reconnect-delay=60 -device virtio-blk-pci,drive={id}"
                ))
            }
            // A guest has a better way.
            Front::NvmeTcp { .. } | Front::Fuse { .. } | Front::Ublk { .. } => None,
        }
    }

    /// What libvirt's description of a guest needs to have the volume (formatdomain, "Hard drives,
    /// floppy disks, CDROMs", types `vhostuser`, since libvirt 7.1, and `network`; "Memory
    /// backing"). `name`: of the export.
    pub fn libvirt(&self, name: &str) -> Option<String> {
        match self {
            Front::VhostUserBlk { socket, queues, .. } => {
                Some(vhost_in_libvirt(&socket.display().to_string(), *queues))
            }
            Front::Nbd { socket: Some(socket), .. } => {
                let socket = in_xml(&socket.display().to_string());
                Some(nbd_in_libvirt(name, &format!("transport='unix' socket='{socket}'")))
            }
            Front::Nbd { listen: Some(listen), .. } => {
                let (host, port) = (reached_at(*listen), listen.port());
                Some(nbd_in_libvirt(name, &format!("name='{host}' port='{port}'")))
            }
            // A guest has a better way.
            Front::Nbd { .. } | Front::NvmeTcp { .. } | Front::Fuse { .. } | Front::Ublk { .. } => {
                None
            }
        }
    }
}

/// Who listens everywhere is reached at any address of this host.
fn reached_at(listen: SocketAddr) -> String {
    if listen.ip().is_unspecified() { "ADDRESS".to_owned() } else { listen.ip().to_string() }
}

fn nbd_in_libvirt(name: &str, host: &str) -> String {
    format!(
        "<devices>\n  \
           <disk type='network' device='disk'>\n    \
             <driver name='qemu' type='raw' discard='unmap'/>\n    \
             <source protocol='nbd' name='{name}'>\n      \
               <host {host}/>\n      \
               <reconnect delay='60'/>\n    \
             </source>\n    \
             <target dev='vda' bus='virtio'/>\n  \
           </disk>\n\
         </devices>"
    )
}

fn vhost_in_libvirt(socket: &str, queues: u16) -> String {
    format!(
        "<memoryBacking>\n  \
           <source type='memfd'/>\n  \
           <access mode='shared'/>\n\
         </memoryBacking>\n\
         <devices>\n  \
           <disk type='vhostuser' device='disk'>\n    \
             <driver name='qemu' type='raw' queues='{queues}'/>\n    \
             <source type='unix' path='{}'>\n      \
               <reconnect enabled='yes' timeout='1'/>\n    \
             </source>\n    \
             <target dev='vda' bus='virtio'/>\n  \
           </disk>\n\
         </devices>",
        in_xml(socket)
    )
}

/// What an export is called in QEMU: as everywhere, unless that does not begin with a letter, or is
/// too long. A guest may have several disks: no two exports are called the same.
fn in_qemu(name: &str) -> String {
    if name.starts_with(|c: char| c.is_ascii_alphabetic()) && name.len() <= NODE_BYTES_MAX {
        return name.to_owned();
    }
    let whole = Uuid::new_v5(&Uuid::NAMESPACE_OID, name.as_bytes()).simple().to_string();
    // 5 + 17 + 1 + 8 = 31 bytes.
    format!("disk-{name:.17}-{whole:.8}")
}

/// As QEMU reads it in an option.
fn in_option(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// As it stands in an attribute (XML 1.0, 2.4).
fn in_xml(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;")
}

fn queues(asked: &ExportCreate, most: u16) -> Answer<u16> {
    let queues = asked.queues.unwrap_or(most);
    match (1..=most).contains(&queues) {
        true => Ok(queues),
        false => Err(Refusal::invalid(format!("an export cannot have {queues} queues"))
            .fix(format!("use 1 to {most}"))),
    }
}

/// The number of a new block device: the one that is wanted, or the first that neither the kernel
/// has nor another export.
fn device(wanted: Option<u32>, others: &[Offered]) -> Answer<u32> {
    let is_free = |id: &u32| {
        let is_its = |front: &Front| matches!(front, Front::Ublk { device, .. } if device == id);
        !others.iter().any(|(_, front)| is_its(front)) && !ublk::is_taken(*id)
    };
    match wanted {
        Some(id) if id > ublk::ID_MAX => {
            Err(Refusal::invalid(format!("a block device cannot have the number {id}"))
                .fix(format!("use 0 to {}", ublk::ID_MAX)))
        }
        Some(id) => Ok(id),
        None => (0..=ublk::ID_MAX)
            .find(is_free)
            .ok_or_else(|| Refusal::conflict("all block devices of this kind are taken")),
    }
}

fn block_bytes(wanted: Option<u32>) -> Answer<u32> {
    let [usual, large] = ublk::BLOCK_BYTES;
    match wanted.unwrap_or(usual) {
        bytes if bytes == usual || bytes == large => Ok(bytes),
        bytes => Err(Refusal::invalid(format!("blocks cannot have {bytes} bytes"))
            .fix(format!("use {usual} or {large}"))),
    }
}

/// Nothing that is asked for is passed over.
fn check_options(asked: &ExportCreate) -> Answer<()> {
    use ExportKind::{Fuse, Nbd, NvmeTcp, Ublk, VhostUserBlk};
    let is_placed = asked.socket.is_some() && asked.kind == Ublk;
    // Option, whether it is there, for which kinds it is, and what else there is.
    let options: [(_, _, &[ExportKind], _); 12] = [
        (
            "--listen",
            asked.listen.is_some(),
            &[NvmeTcp, Nbd],
            "leave --listen out, or use --kind nvme-tcp or nbd",
        ),
        ("--nqn", asked.nqn.is_some(), &[NvmeTcp], "leave --nqn out, or use --kind nvme-tcp"),
        ("--nsid", asked.nsid.is_some(), &[NvmeTcp], "leave --nsid out, or use --kind nvme-tcp"),
        ("--host", !asked.hosts.is_empty(), &[NvmeTcp], "leave --host out, or use --kind nvme-tcp"),
        (
            "--host-secret",
            !asked.host_secrets.is_empty(),
            &[NvmeTcp],
            "leave --host-secret out, or use --kind nvme-tcp",
        ),
        (
            "--controller-secret",
            asked.controller_secret.is_some(),
            &[NvmeTcp],
            "leave --controller-secret out, or use --kind nvme-tcp",
        ),
        ("--queues", asked.queues.is_some(), &[VhostUserBlk, NvmeTcp, Ublk], "leave --queues out"),
        ("--id", asked.device.is_some(), &[Ublk], "leave --id out, or use --kind ublk"),
        ("--block", asked.block_bytes.is_some(), &[Ublk], "leave --block out, or use --kind ublk"),
        ("path of its own", is_placed, &[], "its place is /dev/ublkbN: use --id N"),
        (
            "socket",
            asked.socket.is_some(),
            &[VhostUserBlk, Nbd],
            "leave --path out, or use --kind nbd",
        ),
        ("file", asked.file.is_some(), &[Fuse], "leave --path out, or use --kind fuse"),
    ];
    let is_odd = |(_, is_there, kinds, _): &&(_, bool, &[ExportKind], _)| {
        *is_there && !kinds.contains(&asked.kind)
    };
    if let Some((option, _, _, fix)) = options.iter().find(is_odd) {
        let kind = asked.kind.name();
        return Err(Refusal::invalid(format!("an export by {kind} has no {option}")).fix(*fix));
    }
    if asked.listen.is_some_and(|address| address.port() == 0) {
        let fix = "name a port; NVMe/TCP's own is 4420, NBD's 10809";
        return Err(Refusal::invalid("an export cannot listen at port 0").fix(fix));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// QEMU's `id_wellformed`, and the room in its `BlockDriverState`.
    #[test]
    fn qemu_can_call_every_export_by_some_name() {
        let long = |last: char| format!("{}{last}", "x".repeat(62));
        let fits = "x".repeat(NODE_BYTES_MAX);
        let names = ["0", "_0", "7.a-b_c", "disk-0", "x_0", &long('a'), &long('b'), &fits];
        let called: BTreeSet<String> = names.iter().map(|name| in_qemu(name)).collect();
        assert_eq!(called.len(), names.len());
        for its in &called {
            assert!(its.starts_with(|c: char| c.is_ascii_alphabetic()), "{its}");
            assert!(its.len() <= NODE_BYTES_MAX, "{its}");
            assert!(its.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c)), "{its}");
        }
        assert_eq!((in_qemu("pg.0"), in_qemu(&fits)), ("pg.0".to_owned(), fits));
    }

    #[test]
    fn options_for_qemu_agree_on_the_name_and_ask_for_the_export() {
        let (socket, access) = (PathBuf::from("/run/0.sock"), SocketAccess::default());
        let id = in_qemu("0");
        let front = Front::VhostUserBlk { socket, queues: 2, access: access.clone() };
        let options = front.qemu("0").unwrap();
        assert!(options.contains(&format!("socket,id={id},path=/run/0.sock,")), "{options}");
        assert!(options.contains(&format!("pci,chardev={id},num-queues=2")), "{options}");
        let front = Front::Nbd { socket: Some("/run/0.sock".into()), listen: None, access };
        let options = front.qemu("0").unwrap();
        assert!(options.contains(&format!("nbd,node-name={id},server.type=unix")), "{options}");
        assert!(options.contains(",export=0,"), "{options}");
        assert!(options.ends_with(&format!("pci,drive={id}")), "{options}");
    }

    #[test]
    fn who_listens_everywhere_is_reached_at_an_address() {
        let listen = Some("0.0.0.0:10809".parse().unwrap());
        let front = Front::Nbd { socket: None, listen, access: SocketAccess::default() };
        assert!(front.qemu("e").unwrap().contains("server.host=ADDRESS,server.port=10809"));
        assert!(front.libvirt("e").unwrap().contains("<host name='ADDRESS' port='10809'/>"));
    }

    #[test]
    fn odd_paths_are_written_as_qemu_and_libvirt_read_them() {
        let (socket, access) = ("/run/a,b&'c<.sock".into(), SocketAccess::default());
        let front = Front::VhostUserBlk { socket, queues: 2, access };
        assert!(front.qemu("pg").unwrap().contains("path=/run/a,,b&'c<.sock,reconnect=1"));
        assert!(front.libvirt("e").unwrap().contains("path='/run/a,b&amp;&apos;c&lt;.sock'>"));
    }
}
