//! Where CPUs are: on which node, behind which cache, on which core.
//!
//! What the kernel says of them: Documentation/ABI/testing/sysfs-devices-system-cpu and
//! Documentation/ABI/stable/sysfs-devices-node. Where it says nothing, a CPU stands alone: on a
//! core and behind a cache of its own, on node 0.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::read_to_string;
use std::path::Path;

/// Where the system tells of its CPUs.
pub const SYSTEM: &str = "/sys/devices/system";

/// Most CPUs that a list may name: more than any kernel is built for.
const CPUS_MAX: usize = 1 << 16;

/// Where one CPU is. Cores and caches go by the first CPU that has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub node: usize,
    /// What its siblings of simultaneous multithreading share with it.
    pub core: usize,
    /// The last cache before memory.
    pub cache: usize,
}

/// How far a CPU is from another one, the nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Distance {
    Same,
    /// On another core behind the same cache.
    Cache,
    /// On the same core: nearer still, but the two take turns.
    Core,
    Node,
    Machine,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    places: BTreeMap<usize, Place>,
}

impl Topology {
    /// Of these CPUs. `system`: [`SYSTEM`].
    pub fn read(system: &Path, cpus: &[usize]) -> Topology {
        let places = cpus.iter().map(|cpu| (*cpu, read_place(system, *cpu)));
        Topology { places: places.collect() }
    }

    #[cfg(test)]
    pub fn of(places: impl IntoIterator<Item = (usize, Place)>) -> Topology {
        Topology { places: places.into_iter().collect() }
    }

    pub fn place(&self, cpu: usize) -> Place {
        self.places.get(&cpu).copied().unwrap_or(Place { node: 0, core: cpu, cache: cpu })
    }

    pub fn shares_core(&self, one: usize, other: usize) -> bool {
        self.place(one).core == self.place(other).core
    }

    pub fn distance(&self, from: usize, to: usize) -> Distance {
        let (a, b) = (self.place(from), self.place(to));
        if from == to {
            Distance::Same
        } else if a.core == b.core {
            Distance::Core
        } else if a.cache == b.cache {
            Distance::Cache
        } else if a.node == b.node {
            Distance::Node
        } else {
            Distance::Machine
        }
    }
}

/// The node that a device is on, by its directory under `/sys/devices` or any below it; `None`: the
/// system does not say, or it is on none.
pub fn node_of_device(directory: &Path) -> Option<usize> {
    let said = directory.ancestors().find_map(|at| read_to_string(at.join("numa_node")).ok());
    // -1 stands for none.
    said?.trim().parse().ok()
}

fn read_place(system: &Path, cpu: usize) -> Place {
    let at = system.join(format!("cpu/cpu{cpu}"));
    let siblings = ["core_cpus_list", "thread_siblings_list"];
    let core = siblings.iter().find_map(|name| first_of(&at.join("topology").join(name)));
    Place {
        node: node_of_cpu(&at).unwrap_or(0),
        core: core.unwrap_or(cpu),
        cache: last_cache(&at.join("cache")).unwrap_or(cpu),
    }
}

/// The directory of a CPU has a link `nodeN` to its node.
fn node_of_cpu(cpu: &Path) -> Option<usize> {
    let entries = std::fs::read_dir(cpu).ok()?;
    let mut names = entries.flatten().map(|entry| entry.file_name());
    names.find_map(|name| name.to_str()?.strip_prefix("node")?.parse().ok())
}

/// The first CPU that shares the cache of the highest level.
fn last_cache(caches: &Path) -> Option<usize> {
    let entries = std::fs::read_dir(caches).ok()?;
    let caches = entries.flatten().filter_map(|entry| {
        let level: u32 = read_to_string(entry.path().join("level")).ok()?.trim().parse().ok()?;
        Some((level, first_of(&entry.path().join("shared_cpu_list"))?))
    });
    caches.max_by_key(|(level, _)| *level).map(|(_, first)| first)
}

fn first_of(list: &Path) -> Option<usize> {
    parse_cpus(&read_to_string(list).ok()?)?.first().copied()
}

/// CPUs of a list as the kernel writes it and operators do: `0,2-3`. `None`: it is none.
pub fn parse_cpus(text: &str) -> Option<BTreeSet<usize>> {
    let mut cpus = BTreeSet::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last >= CPUS_MAX {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    //! Goal: a machine's CPUs are found where the kernel says they are, whatever it leaves out.
    //! Method: invented trees of files.

    use super::*;

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, format!("{text}\n")).unwrap();
    }

    /// Two nodes of four CPUs: two cores with two siblings each, a cache for each node.
    fn machine(root: &Path) {
        for cpu in 0..8 {
            let at = format!("cpu/cpu{cpu}");
            let (core, node) = (cpu / 2 * 2, cpu / 4);
            let siblings = format!("{core}-{}", core + 1);
            write(root, &format!("{at}/topology/thread_siblings_list"), &siblings);
            std::fs::create_dir_all(root.join(format!("{at}/node{node}"))).unwrap();
            for (index, level, shared) in [
                (0, 1, siblings.clone()),
                (2, 2, siblings.clone()),
                (3, 3, format!("{}-{}", node * 4, node * 4 + 3)),
            ] {
                write(root, &format!("{at}/cache/index{index}/level"), &level.to_string());
                write(root, &format!("{at}/cache/index{index}/shared_cpu_list"), &shared);
            }
        }
    }

    #[test]
    fn cpus_are_where_the_kernel_says() {
        let root = tempfile::tempdir().unwrap();
        machine(root.path());
        let topology = Topology::read(root.path(), &[0, 1, 2, 5, 6]);
        assert_eq!(topology.place(5), Place { node: 1, core: 4, cache: 4 });
        let from_0 = [0, 1, 2, 5, 6].map(|cpu| topology.distance(0, cpu));
        use Distance::{Cache, Core, Machine, Same};
        assert_eq!(from_0, [Same, Core, Cache, Machine, Machine]);
        assert_eq!(topology.distance(6, 5), Cache);
    }

    #[test]
    fn what_is_not_said_is_assumed_to_stand_alone() {
        let root = tempfile::tempdir().unwrap();
        let topology = Topology::read(root.path(), &[3]);
        assert_eq!(topology.place(3), Place { node: 0, core: 3, cache: 3 });
        assert_eq!(topology.distance(3, 4), Distance::Node);
        // Half of a cache's description, and nonsense.
        write(root.path(), "cpu/cpu3/cache/index3/level", "3");
        write(root.path(), "cpu/cpu3/topology/core_cpus_list", "3-");
        assert_eq!(Topology::read(root.path(), &[3]), topology);
    }

    #[test]
    fn devices_have_the_node_of_what_they_are_attached_to() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "pci0/0:1.0/numa_node", "1");
        write(root.path(), "pci0/0:2.0/numa_node", "-1");
        let node = |path: &str| node_of_device(&root.path().join(path));
        assert_eq!(node("pci0/0:1.0/nvme/nvme0/nvme0n1"), Some(1));
        assert_eq!(node("pci0/0:2.0/nvme/nvme1/nvme1n1"), None);
        assert_eq!(node("virtual/loop0"), None);
    }

    #[test]
    fn lists_of_cpus() {
        let list = |text| parse_cpus(text).map(|cpus| cpus.into_iter().collect::<Vec<_>>());
        assert_eq!(list("3,0-1,1\n"), Some(vec![0, 1, 3]));
        for wrong in ["", "a", "1-", "2-1", "0-99999999", "-1", "0;1"] {
            assert_eq!(list(wrong), None, "{wrong:?}");
        }
    }
}
