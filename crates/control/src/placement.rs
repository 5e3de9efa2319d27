//! Which reactor gets what, from where CPUs are: decisions, without a look at the machine.
//!
//! Reactors go by their index among all of them.

use crate::topology::{Distance, Topology};

/// What placement knows of a reactor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reactor {
    pub cpu: usize,
    /// Arrays that live there.
    pub arrays: usize,
    /// Parts of exports that are served there.
    pub exports: usize,
}

/// The reactor for a new array: of those on the node that most of its drives are on, if any is
/// there, the one with the fewest arrays. `nodes`: of the drives, as far as they are known.
pub fn home(topology: &Topology, reactors: &[Reactor], nodes: &[usize]) -> usize {
    let drives_on = |node: usize| nodes.iter().filter(|its| **its == node).count();
    let key = |index: &usize| {
        let Reactor { cpu, arrays, exports } = reactors[*index];
        let away = nodes.len() - drives_on(topology.place(cpu).node);
        (away, arrays, exports, *index)
    };
    (0..reactors.len()).min_by_key(key).expect("at least one reactor")
}

/// The reactors for the queues of an export whose array lives at `home`, which comes first: those
/// behind the same cache; if there is none, those on the same node. Cores that stand by themselves
/// come before siblings, and those that serve little before those that serve more. Never more than
/// `queues`.
pub fn spread(topology: &Topology, reactors: &[Reactor], home: usize, queues: u16) -> Vec<usize> {
    let from = reactors[home].cpu;
    let distance = |index: &usize| topology.distance(from, reactors[*index].cpu);
    let within = |most: Distance| -> Vec<usize> {
        (0..reactors.len()).filter(|index| distance(index) <= most).collect()
    };
    let mut left = within(Distance::Core);
    if left.len() == 1 {
        left = within(Distance::Node);
    }
    let mut chosen: Vec<usize> = Vec::new();
    while chosen.len() < usize::from(queues) && !left.is_empty() {
        let siblings = |index: &usize| {
            let is_sibling =
                |other: &&usize| topology.shares_core(reactors[**other].cpu, reactors[*index].cpu);
            chosen.iter().filter(is_sibling).count()
        };
        let key = |i: &usize| (siblings(i), distance(i), reactors[*i].exports, *i);
        let next = left.iter().copied().min_by_key(key).expect("some are left");
        left.retain(|index| *index != next);
        chosen.push(next);
    }
    chosen
}

/// The reactors on these CPUs, each once, that at `home` first if it is among them; never more than
/// `queues`, since one that gets no queue would only have a share of what the others need. An
/// error: a CPU without.
pub fn on_cpus(
    reactors: &[Reactor],
    home: usize,
    cpus: &[usize],
    queues: u16,
) -> Result<Vec<usize>, usize> {
    let mut chosen = Vec::new();
    for cpu in cpus {
        let index = reactors.iter().position(|its| its.cpu == *cpu).ok_or(*cpu)?;
        if !chosen.contains(&index) {
            chosen.push(index);
        }
    }
    chosen.sort_by_key(|index| *index != home);
    chosen.truncate(queues.into());
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    //! Goal: queues stay near their array and arrays near their drives, and nobody gets it all.
    //! Method: invented machines.

    use super::*;
    use crate::topology::Place;

    /// Two nodes, each of two caches, each of four cores, each of two siblings: CPU 0 to 15 are the
    /// first siblings, 16 to 31 the second ones.
    fn two_nodes() -> Topology {
        Topology::of((0..32).map(|cpu| {
            let core = cpu % 16;
            (cpu, Place { node: core / 8, core, cache: core / 4 * 4 })
        }))
    }

    fn idle(cpus: impl IntoIterator<Item = usize>) -> Vec<Reactor> {
        cpus.into_iter().map(|cpu| Reactor { cpu, arrays: 0, exports: 0 }).collect()
    }

    #[test]
    fn queues_stay_behind_the_cache_of_their_array() {
        let (topology, reactors) = (two_nodes(), idle(0..32));
        assert_eq!(spread(&topology, &reactors, 0, 16), [0, 1, 2, 3, 17, 18, 19, 16]);
        assert_eq!(spread(&topology, &reactors, 6, 4), [6, 4, 5, 7]);
        assert_eq!(spread(&topology, &reactors, 6, 1), [6]);
        assert_eq!(spread(&topology, &reactors, 17, 3), [17, 0, 2]);
    }

    #[test]
    fn siblings_come_last_however_they_are_numbered() {
        let place = |cpu| (cpu, Place { node: 0, core: cpu / 2 * 2, cache: 0 });
        let topology = Topology::of((0..6).map(place));
        assert_eq!(spread(&topology, &idle(0..6), 2, 16), [2, 0, 4, 1, 5, 3]);
        assert_eq!(spread(&topology, &idle([0, 1]), 0, 16), [0, 1]);
    }

    #[test]
    fn without_a_neighbour_behind_the_cache_they_stay_on_the_node() {
        let topology = two_nodes();
        // One reactor for each cache.
        let reactors = idle([0, 4, 8, 12]);
        assert_eq!(spread(&topology, &reactors, 0, 16), [0, 1]);
        assert_eq!(spread(&topology, &reactors, 3, 16), [3, 2]);
        // One for each node: the other one is too far.
        assert_eq!(spread(&topology, &idle([0, 8]), 1, 16), [1]);
        // A machine that says nothing of itself.
        let reactors = idle([0, 1]);
        assert_eq!(spread(&Topology::default(), &reactors, 1, 16), [1, 0]);
    }

    #[test]
    fn exports_of_few_queues_take_different_reactors() {
        let (topology, mut reactors) = (two_nodes(), idle(0..4));
        let mut served = [0; 4];
        for _ in 0..6 {
            for index in spread(&topology, &reactors, 1, 2) {
                reactors[index].exports += 1;
                served[index] += 1;
            }
        }
        assert_eq!(served, [2, 6, 2, 2]);
    }

    #[test]
    fn arrays_go_to_the_node_of_their_drives_and_to_the_quietest_there() {
        let (topology, mut reactors) = (two_nodes(), idle([0, 1, 8, 9]));
        assert_eq!(home(&topology, &reactors, &[]), 0);
        assert_eq!(home(&topology, &reactors, &[1, 1, 0]), 2);
        reactors[2].arrays = 1;
        assert_eq!(home(&topology, &reactors, &[1, 1, 0]), 3);
        reactors[3].arrays = 2;
        assert_eq!(home(&topology, &reactors, &[1, 1, 0]), 2);
        assert_eq!(home(&topology, &reactors, &[0, 1]), 0);
        // Nobody is there.
        assert_eq!(home(&topology, &reactors, &[7, 7]), 0);
        reactors[0].arrays = 1;
        assert_eq!(home(&topology, &reactors, &[7, 7]), 1);
    }

    #[test]
    fn an_operator_may_choose() {
        let reactors = idle([2, 4, 6]);
        assert_eq!(on_cpus(&reactors, 1, &[6, 4], 16), Ok(vec![1, 2]));
        assert_eq!(on_cpus(&reactors, 1, &[6, 2], 16), Ok(vec![2, 0]));
        assert_eq!(on_cpus(&reactors, 1, &[5], 16), Err(5));
        // No more than get a queue, and each once.
        assert_eq!(on_cpus(&reactors, 1, &[6, 2, 4], 2), Ok(vec![1, 2]));
        assert_eq!(on_cpus(&reactors, 1, &[6, 2, 6, 2], 16), Ok(vec![2, 0]));
        assert_eq!(on_cpus(&reactors, 1, &[6, 6, 2], 2), Ok(vec![2, 0]));
        assert_eq!(on_cpus(&reactors, 1, &[6, 5], 1), Err(5));
    }
}
