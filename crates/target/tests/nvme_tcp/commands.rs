//! What hosts may ask, and get.

use ashlar_reactor::nvme::command::{
    Command, ControllerIdentity, FEATURE_QUEUES, NamespaceIdentity, Sgl, Status, first_namespace,
};
use ashlar_reactor::nvme::fabrics::{
    ANY_CONTROLLER, DISCOVERY_NQN, DiscoveryEntry, DiscoveryHeader, LOG_DISCOVERY, Property,
    property_set,
};
use ashlar_reactor::nvme::pdu::{Digests, header};
use ashlar_reactor::prng::Prng;
use ashlar_target::export::Export;

use crate::host::{Choice, HOST, Host, Wire};
use crate::{DISK, Offered, SUBSYSTEM};

fn pattern(prng: &mut Prng, len: usize) -> Vec<u8> {
    (0..len).map(|_| prng.below(256) as u8).collect()
}

fn choices() -> impl Iterator<Item = Choice> {
    (0..8_u8).map(|bits| Choice {
        digests: Digests::from_byte(bits),
        alignment: if bits & 1 == 0 { 0 } else { 31 },
        flow_control: bits & 4 != 0,
        ..Choice::PLAIN
    })
}

#[test]
fn what_is_written_is_read_with_every_choice() {
    let offered = Offered::open();
    let mut model = vec![0_u8; DISK as usize];
    let mut prng = Prng::from_seed(5);
    for choice in choices() {
        let mut host = Host::connect(offered.at(), SUBSYSTEM, choice);
        for round in 0..60 {
            let blocks = [1, 8, 9, 32, 64, 2048][prng.index(6)].min(DISK / 512);
            let block = prng.below(DISK / 512 - blocks + 1);
            let at = (block * 512) as usize..((block + blocks) * 512) as usize;
            match round % 4 {
                0 | 1 => {
                    let data = pattern(&mut prng, at.len());
                    host.write(1, block, &data);
                    model[at].copy_from_slice(&data);
                }
                2 => assert_eq!(host.read(1, block, blocks as u32), model[at], "{round}"),
                _ => {
                    let zeroes = Command::write_zeroes(1, block, blocks as u32, round % 8 == 3);
                    assert!(host.io.run(zeroes, 0).0.is_success());
                    model[at].fill(0);
                }
            }
        }
        let whole: Vec<u8> =
            (0..DISK / 512).step_by(2048).flat_map(|block| host.read(1, block, 2048)).collect();
        assert!(whole == model);
    }
    offered.end();
}

#[test]
fn many_commands_at_a_time() {
    let offered = Offered::open();
    let digests = Digests { header: true, data: true };
    let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice { digests, ..Choice::PLAIN });
    let mut prng = Prng::from_seed(6);
    for blocks in [8_usize, 64, 1024] {
        let data: Vec<Vec<u8>> = (0..31).map(|_| pattern(&mut prng, blocks * 512)).collect();
        let at = |i: usize| (i * blocks) as u64;
        // More than may be held for a connection: some wait for others.
        let ids: Vec<u16> = (0..31)
            .map(|i| {
                let write = Command::write(1, at(i), blocks as u32);
                host.io.give(write, &data[i], blocks <= 32 && i % 2 == 0)
            })
            .collect();
        for id in ids {
            assert!(host.io.wait(id).unwrap().0.status.is_success());
        }
        let read = |i: usize| Command::read(1, at(i), blocks as u32);
        let ids: Vec<u16> = (0..31).map(|i| host.io.ask(read(i), blocks * 512)).collect();
        for (i, id) in ids.into_iter().enumerate() {
            let (completion, found) = host.io.wait(id).unwrap();
            assert!(completion.status.is_success() && found == data[i], "{blocks} {i}");
        }
    }
    let status = offered.export.status().unwrap();
    assert_eq!((status.counters.reads, status.counters.writes), (93, 93));
    assert_eq!(status.queues_of_parts.iter().sum::<u16>(), 2);
    offered.end();
}

#[test]
fn comparisons_do_not_wait_for_each_other() {
    let offered = Offered::open();
    let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    let data = pattern(&mut Prng::from_seed(7), 1 << 20);
    host.write(1, 0, &data);
    // Of the largest: what is given for four of them is all that is held for a connection.
    let ids: Vec<u16> = (0..16).map(|_| host.io.give(compare(0, 2048), &data, false)).collect();
    for id in ids {
        assert_eq!(host.io.wait(id).unwrap().0.status, Status::SUCCESS);
    }
    offered.end();
}

fn compare(block: u64, blocks: u32) -> Command {
    let mut compare = Command::write(1, block, blocks);
    compare.dwords[0] = compare.dwords[0] & !0xff | 5;
    compare
}

#[test]
fn hints_comparisons_and_flushes() {
    let offered = Offered::open();
    let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    let data: Vec<u8> = (0..8192_u32).map(|i| (i / 7) as u8).collect();
    host.write(1, 16, &data);
    for (in_capsule, len) in [(true, 8192), (false, 8192), (false, 512)] {
        let compare = compare(16, (len / 512) as u32);
        assert_eq!(host.io.put(compare, &data[..len], in_capsule), Status::SUCCESS);
        let mut other = data[..len].to_vec();
        other[len - 1] ^= 1;
        assert_eq!(host.io.put(compare, &other, in_capsule), Status::COMPARE_FAILED);
    }
    // Those that found a difference count, too: the last of all was one.
    // By the next answer, of the admin queue, what went before is counted.
    let counted = |host: &mut Host| {
        assert!(host.admin.run(Command::keep_alive(), 0).0.is_success());
        let traffic = offered.export.status().unwrap().traffic;
        (traffic.reads.total.count, traffic.flushes.total.count)
    };
    assert_eq!(counted(&mut host), (6, 0));
    let before = offered.rig.flushes().iter().sum::<u64>();
    assert!(host.io.run(Command::flush(1), 0).0.is_success());
    assert!(host.io.run(Command::flush(u32::MAX), 0).0.is_success());
    assert_eq!(counted(&mut host), (6, 2));
    let durable = Command::write(1, 16, 16).with_force_unit_access();
    assert!(host.io.put(durable, &data, true).is_success());
    assert_eq!(offered.export.status().unwrap().counters.flushes, 3);
    // What is read, or compared, is durable before it is answered.
    let (status, found) = host.io.run(Command::read(1, 16, 16).with_force_unit_access(), 8192);
    assert!(status.is_success() && found == data);
    assert_eq!(offered.export.status().unwrap().counters.flushes, 4);
    let compared = host.io.put(compare(16, 16).with_force_unit_access(), &data, true);
    assert_eq!(compared, Status::SUCCESS);
    assert_eq!(offered.export.status().unwrap().counters.flushes, 5);
    assert!(offered.rig.flushes().iter().sum::<u64>() >= before);
    // Two ranges: the first 8 MiB, and nothing.
    // With room for all that there can be, as Linux sends them.
    let mut ranges = [0; 4096];
    ranges[4..8].copy_from_slice(&16384_u32.to_le_bytes());
    for in_capsule in [true, false] {
        host.write(1, 16, &data);
        assert!(host.io.put(Command::deallocate(1, 2), &ranges, in_capsule).is_success());
        assert!(host.read(1, 16, 16).iter().all(|byte| *byte == 0));
    }
    offered.end();
}

#[test]
fn what_cannot_be_is_refused_and_the_connection_goes_on() {
    let offered = Offered::open();
    let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    let end = DISK / 512;
    let cases = [
        (Command::read(1, end, 1), 512, Status::OUT_OF_RANGE),
        (Command::read(1, end - 1, 2), 1024, Status::OUT_OF_RANGE),
        (Command::read(1, u64::MAX, 1), 512, Status::OUT_OF_RANGE),
        (Command::read(2, 0, 1), 512, Status::INVALID_NAMESPACE),
        (Command::read(0, 0, 1), 512, Status::INVALID_NAMESPACE),
        (Command::read(1, 0, 2), 512, Status::SGL_LENGTH),
        (Command::read(1, 0, 4096), 4096 * 512, Status::INVALID_FIELD),
        (
            Command { dwords: [0x7e, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0] },
            0,
            Status::INVALID_OPCODE,
        ),
    ];
    for (command, len, expected) in cases {
        let (status, data) = host.io.run(command, len);
        assert_eq!((status, data.len()), (expected.for_good(), 0), "{command:?}");
    }
    // Data that is not where the command says.
    let beyond = Command::write(1, 0, 2).with_sgl(Sgl::InCapsule { offset: 512, bytes: 1024 });
    let bytes = host.io.capsule(beyond.with_id(0x8000), &[1; 1024]);
    host.io.send_raw(&bytes);
    let (completion, _) = host.io.wait(0x8000).unwrap();
    assert_eq!(completion.status, Status::SGL_OFFSET.for_good());
    let nothing = Command::write(1, 0, 2).with_sgl(Sgl::InCapsule { offset: 0, bytes: 1024 });
    let bytes = host.io.capsule(nothing.with_id(0x8001), &[]);
    host.io.send_raw(&bytes);
    assert_eq!(host.io.wait(0x8001).unwrap().0.status, Status::SGL_TYPE.for_good());
    host.write(1, 0, &[3; 1024]);
    assert_eq!(host.read(1, 0, 2), [3; 1024]);
    assert_eq!(offered.export.status().unwrap().last_error, None);
    offered.end();
}

#[test]
fn a_host_finds_out_what_there_is() {
    let offered = Offered::open();
    let mut discovery = Wire::open(offered.at(), Choice::PLAIN);
    discovery.connect((DISCOVERY_NQN, HOST), 0, 0xffff).unwrap();
    discovery.enable();
    let log = Command::get_log_page(LOG_DISCOVERY, 0, 3072, 0);
    let (status, page) = discovery.run(log, 3072);
    assert!(status.is_success());
    let head: DiscoveryHeader = header(&page).unwrap();
    assert_eq!(head.entries.get(), 2);
    let entry: DiscoveryEntry = header(&page[2048..]).unwrap();
    assert!(entry.subsystem.starts_with(SUBSYSTEM.as_bytes()));
    let port = offered.at().port().to_string();
    assert!(entry.service.starts_with(port.as_bytes()) && entry.address.starts_with(b"127.0.0.1 "));
    let (status, rest) = discovery.run(Command::get_log_page(LOG_DISCOVERY, 0, 1024, 2048), 1024);
    assert!(status.is_success() && rest == page[2048..]);

    let Host { mut admin, controller, .. } = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    let page = |admin: &mut Wire, command: Command| -> [u8; 4096] {
        let (status, data) = admin.run(command, 4096);
        assert!(status.is_success(), "{status:?}");
        data.try_into().unwrap()
    };
    let found = page(&mut admin, Command::identify_controller());
    assert_eq!(ControllerIdentity::decode(&found).model, "Ashlar");
    assert_eq!(found[78..80], controller.to_le_bytes());
    let list = page(&mut admin, Command::identify_active_namespaces());
    assert_eq!((first_namespace(&list), list[4]), (Some(1), 0));
    let found = NamespaceIdentity::decode(&page(&mut admin, Command::identify_namespace(1)));
    assert_eq!((found.blocks, found.block_log2), (DISK / 512, 9));
    let names = page(&mut admin, Command::identify_namespace_descriptors(1));
    assert_eq!(names[..4], [2, 16, 0, 0]);
    assert_eq!(names[4..20], [2; 16], "the volume's uuid");
    assert_eq!(admin.property(Property::Version), 0x1_0400);
    for log in [1, 2, 3, 5] {
        let (status, _) = admin.run(Command::get_log_page(log, 0, 64, 0), 64);
        assert!(status.is_success(), "log page {log}");
    }
    let (status, _) = admin.run(Command::get_log_page(0x0c, 0, 64, 0), 64);
    assert_eq!(status, Status::INVALID_LOG_PAGE.for_good(), "there is no ANA");
    let (status, _) = admin.run(Command::keep_alive(), 0);
    assert!(status.is_success());
    offered.end();
}

#[test]
fn a_host_asks_for_queues_before_the_first() {
    let offered = Offered::open();
    let mut admin = Wire::open(offered.at(), Choice::PLAIN);
    let controller = admin.connect((SUBSYSTEM, HOST), 0, ANY_CONTROLLER).unwrap();
    let ask = |admin: &mut Wire, command: Command| {
        let id = admin.ask(command, 0);
        let (completion, _) = admin.wait(id).unwrap();
        (completion.status, completion.result)
    };
    let has = |last: u32| (Status::SUCCESS, last << 16 | last);
    let get = Command::get_feature(FEATURE_QUEUES);
    admin.enable();
    assert_eq!(ask(&mut admin, get), has(3), "four are there");
    assert_eq!(ask(&mut admin, Command::set_queue_count(200)), has(3));
    assert_eq!(ask(&mut admin, get), has(3));
    assert_eq!(ask(&mut admin, Command::set_queue_count(2)), has(1));
    assert_eq!(ask(&mut admin, get), has(1));
    let mut io = Wire::open(offered.at(), Choice::PLAIN);
    io.connect((SUBSYSTEM, HOST), 1, controller).unwrap();
    let late = (Status::SEQUENCE.for_good(), 0);
    assert_eq!(ask(&mut admin, Command::set_queue_count(4)), late);
    assert_eq!(ask(&mut admin, get), has(1));
    // A reset begins anew.
    assert!(admin.run(property_set(Property::Configuration, 0x46_0000), 0).0.is_success());
    while admin.property(Property::Status) != 0 {}
    admin.enable();
    assert_eq!(ask(&mut admin, get), has(3));
    assert_eq!(ask(&mut admin, Command::set_queue_count(1)), has(0));
    offered.end();
}
