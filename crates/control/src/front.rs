//! Front ends: by which protocol a volume is offered, and where.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use ashlar_target::disk::PARTS_MAX;
use ashlar_target::nvme_tcp::{self, NAMESPACES_MAX, check_nqn};
use ashlar_target::vhost::QUEUES_MAX;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::api::export::{ExportCreate, ExportKind, NvmeNamespace};
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
    /// One namespace of a subsystem.
    NvmeTcp {
        listen: SocketAddr,
        nqn: String,
        nsid: u32,
        /// None: any.
        #[serde(default)]
        hosts: Vec<String>,
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
        let socket = || {
            let own = || directory.join(format!("{}.sock", asked.name));
            asked.socket.clone().unwrap_or_else(own)
        };
        match asked.kind {
            ExportKind::VhostUserBlk => {
                refuse_nvme(asked)?;
                let queues = asked.queues.unwrap_or(QUEUES_DEFAULT);
                if !(1..=QUEUES_MAX).contains(&queues) {
                    let text = format!("an export cannot have {queues} queues");
                    return Err(Refusal::invalid(text).fix(format!("use 1 to {QUEUES_MAX}")));
                }
                Ok(Front::VhostUserBlk { socket: socket(), queues })
            }
            ExportKind::NvmeTcp => nvme_tcp(asked, volume, others),
        }
    }

    pub fn kind(&self) -> ExportKind {
        match self {
            Front::VhostUserBlk { .. } => ExportKind::VhostUserBlk,
            Front::NvmeTcp { .. } => ExportKind::NvmeTcp,
        }
    }

    /// The Unix socket that initiators connect to.
    pub fn socket(&self) -> Option<&Path> {
        match self {
            Front::VhostUserBlk { socket, .. } => Some(socket),
            Front::NvmeTcp { .. } => None,
        }
    }

    /// Most queues that an initiator may use.
    pub fn queues(&self) -> Option<u16> {
        match self {
            Front::VhostUserBlk { queues, .. } | Front::NvmeTcp { queues, .. } => Some(*queues),
        }
    }

    /// How many reactors can serve it at most.
    pub fn parts_max(&self) -> u16 {
        match self {
            Front::VhostUserBlk { queues, .. } => *queues,
            Front::NvmeTcp { queues, .. } => (*queues).min(PARTS_MAX),
        }
    }

    /// Where initiators find it.
    pub fn place(&self) -> String {
        match self {
            Front::VhostUserBlk { socket, .. } => socket.display().to_string(),
            Front::NvmeTcp { listen, nqn, nsid, .. } => {
                format!("nvme-tcp://{listen}/{nqn}?nsid={nsid}")
            }
        }
    }

    /// Where both would have to be, and only one can.
    pub fn clash_with(&self, other: &Front) -> Option<String> {
        let socket = self.socket().filter(|its| other.socket() == Some(its));
        let socket = socket.map(|its| its.display().to_string());
        let place = |front: &Front| match front {
            Front::VhostUserBlk { .. } => None,
            Front::NvmeTcp { listen, nqn, nsid, .. } => Some((*listen, nqn.clone(), *nsid)),
        };
        let namespace = || place(self).filter(|its| place(other).as_ref() == Some(its));
        socket
            .or_else(|| namespace().map(|(at, nqn, id)| format!("namespace {id} of {nqn} at {at}")))
    }

    /// As NVMe hosts find it.
    pub fn nvme(&self) -> Option<NvmeNamespace> {
        let Front::NvmeTcp { listen, nqn, nsid, hosts, .. } = self else { return None };
        // Who listens everywhere is reached at any address of this host.
        let is_any = listen.ip().is_unspecified();
        let address = if is_any { "ADDRESS".to_owned() } else { listen.ip().to_string() };
        Some(NvmeNamespace {
            nqn: nqn.clone(),
            nsid: *nsid,
            listen: *listen,
            hosts: hosts.clone(),
            connect: format!("nvme connect -t tcp -a {address} -s {} -n {nqn}", listen.port()),
        })
    }

    /// What initiators see as the serial number, where it is not the volume's.
    pub fn serial(&self) -> Option<String> {
        match self {
            Front::VhostUserBlk { .. } => None,
            Front::NvmeTcp { nqn, .. } => Some(nvme_tcp::serial(nqn)),
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
            Front::NvmeTcp { .. } => None,
        }
    }

    /// What libvirt's description of a guest needs to have the volume (formatdomain, "Hard drives,
    /// floppy disks, CDROMs", type `vhostuser`, since libvirt 7.1; "Memory backing").
    pub fn libvirt(&self) -> Option<String> {
        match self {
            Front::VhostUserBlk { socket, queues } => Some(format!(
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
                in_xml(&socket.display().to_string())
            )),
            Front::NvmeTcp { .. } => None,
        }
    }
}

/// As it stands in an attribute (XML 1.0, 2.4).
fn in_xml(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_paths_are_written_as_qemu_and_libvirt_read_them() {
        let front = Front::VhostUserBlk { socket: "/run/a,b&'c<.sock".into(), queues: 2 };
        assert!(front.qemu("pg").unwrap().contains("path=/run/a,,b&'c<.sock,reconnect=1"));
        assert!(front.libvirt().unwrap().contains("path='/run/a,b&amp;&apos;c&lt;.sock'>"));
    }
}

/// What only NVMe hosts understand.
fn refuse_nvme(asked: &ExportCreate) -> Answer<()> {
    let options = [
        ("--listen", asked.listen.is_some()),
        ("--nqn", asked.nqn.is_some()),
        ("--nsid", asked.nsid.is_some()),
        ("--host", !asked.hosts.is_empty()),
    ];
    match options.iter().find(|(_, is_there)| *is_there) {
        None => Ok(()),
        Some((option, _)) => {
            let text = format!("a disk of a virtual machine has no {option}");
            Err(Refusal::invalid(text).fix(format!("leave it out, or use {NVME_TCP}")))
        }
    }
}

const NVME_TCP: &str = "--kind nvme-tcp";

fn nvme_tcp(asked: &ExportCreate, volume: Uuid, others: &[Offered]) -> Answer<Front> {
    if asked.socket.is_some() {
        let text = "NVMe hosts connect to an address, not to a socket";
        return Err(Refusal::invalid(text).fix("use --listen ADDRESS:PORT in place of --path"));
    }
    let none = || Refusal::invalid("an address to listen at is needed");
    let listen = asked
        .listen
        .ok_or_else(|| none().fix("name one of this host, such as --listen 192.0.2.1:4420"))?;
    if listen.port() == 0 {
        let text = "an export cannot listen at port 0";
        return Err(Refusal::invalid(text).fix("name a port; that of NVMe/TCP is 4420"));
    }
    let own = || format!("nqn.2014-08.org.nvmexpress:uuid:{volume}");
    let nqn = asked.nqn.clone().unwrap_or_else(own);
    for name in std::iter::once(&nqn).chain(&asked.hosts) {
        if let Some(why) = check_nqn(name) {
            let fix = "a host's is in its /etc/nvme/hostnqn; a subsystem's may be left out";
            return Err(Refusal::invalid(why).fix(fix));
        }
    }
    let queues = asked.queues.unwrap_or(QUEUES_DEFAULT);
    if !(1..=nvme_tcp::QUEUES_MAX).contains(&queues) {
        let text = format!("an export cannot have {queues} queues");
        return Err(Refusal::invalid(text).fix(format!("use 1 to {}", nvme_tcp::QUEUES_MAX)));
    }
    let nsid = namespace_number(asked.nsid, &nqn, volume, listen, others)?;
    Ok(Front::NvmeTcp { listen, nqn, nsid, hosts: asked.hosts.clone(), queues })
}

/// Which namespace it is. A host that reaches a subsystem at several addresses takes what has one
/// number for one volume, and what has one uuid for one namespace.
fn namespace_number(
    asked: Option<u32>,
    nqn: &str,
    volume: Uuid,
    listen: SocketAddr,
    others: &[Offered],
) -> Answer<u32> {
    let of_subsystem = others.iter().filter_map(|(volume, front)| match front {
        Front::NvmeTcp { nqn: its, nsid, listen, .. } if its == nqn => {
            Some((*volume, *nsid, *listen))
        }
        Front::NvmeTcp { .. } | Front::VhostUserBlk { .. } => None,
    });
    let known: Vec<(Uuid, u32, SocketAddr)> = of_subsystem.collect();
    let same = known.iter().find(|(its, _, _)| *its == volume);
    if let Some((_, nsid, at)) = same {
        if *at == listen || asked.is_some_and(|asked| asked != *nsid) {
            let text = format!("the volume is namespace {nsid} of {nqn} at {at} already");
            return Err(Refusal::conflict(text).fix("choose another --nqn or another --volume"));
        }
        return Ok(*nsid);
    }
    let is_taken = |nsid: &u32| known.iter().any(|(_, its, _)| its == nsid);
    match asked {
        Some(nsid) if !(1..=NAMESPACES_MAX).contains(&nsid) => {
            let text = format!("a namespace cannot have the number {nsid}");
            Err(Refusal::invalid(text).fix(format!("use 1 to {NAMESPACES_MAX}")))
        }
        Some(nsid) if is_taken(&nsid) => {
            let text = format!("{nqn} has a namespace {nsid} already, of another volume");
            Err(Refusal::conflict(text).fix("choose another --nsid, or leave it out"))
        }
        Some(nsid) => Ok(nsid),
        None => (1..=NAMESPACES_MAX).find(|nsid| !is_taken(nsid)).ok_or_else(|| {
            let text = format!("{nqn} has {NAMESPACES_MAX} namespaces");
            Refusal::conflict(text).fix("choose another --nqn")
        }),
    }
}
