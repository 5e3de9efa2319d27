//! Measures an NVMe/TCP namespace as one host with one queue sees it, from a CPU of its own that
//! polls the socket: random reads or writes of 4 KiB. Every block that is read is checked against
//! what was written there first.
//!
//! `nvme_tcp_io ADDRESS:PORT NQN CPU DEPTH SECONDS read|write [MIB]`
#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a tool of tests")]

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use ashlar_reactor::cores::pin;
use ashlar_reactor::nvme::command::{Command, Completion, Sgl};
use ashlar_reactor::nvme::fabrics::{self, ANY_CONTROLLER, Connect, ConnectData, Property};
use ashlar_reactor::nvme::pdu::{
    COMMON_BYTES, CapsuleCmd, CapsuleResp, Common, Data, Digests, IcReq, Kind, SUCCESS, Shape,
    header,
};
use ashlar_reactor::prng::Prng;
use zerocopy::IntoBytes;

const BLOCK: usize = 4096;
const HOST: &str = "nqn.2026-01.example:nvme-tcp-io";
const NONE: Digests = Digests { header: false, data: false };

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [address, subsystem, cpu, depth, seconds, work, rest @ ..] = words.as_slice() else {
        panic!("ADDRESS:PORT NQN CPU DEPTH SECONDS read|write [MIB]");
    };
    pin(cpu.parse().unwrap()).unwrap();
    let depth: u16 = depth.parse().unwrap();
    let mib: u64 = rest.first().map_or(64, |mib| mib.parse().unwrap());
    let mut admin = Queue::connect(address, subsystem, 0, ANY_CONTROLLER, 32);
    admin.run(fabrics::property_set(Property::Configuration, 0x46_0001));
    let mut queue = Queue::connect(address, subsystem, 1, admin.controller, depth + 1);
    let blocks = (mib << 20) / BLOCK as u64;
    let writes = work == "write";
    // Every block is written once, so that what is read is known.
    let mut next = 0;
    queue.work(depth, true, None, blocks, || {
        next += 1;
        next - 1
    });
    let mut prng = Prng::from_seed(1);
    let end = Instant::now() + Duration::from_secs(seconds.parse().unwrap());
    let began = Instant::now();
    let (count, latencies) = queue.work(depth, writes, Some(end), u64::MAX, || prng.below(blocks));
    let seconds = began.elapsed().as_secs_f64();
    let mut latencies = latencies;
    latencies.sort_unstable();
    let at = |percent: usize| latencies[(latencies.len() - 1) * percent / 100] as f64 / 1000.0;
    println!(
        "{work} depth {depth}: {:.0} IOPS, p50 {:.1} us, p99 {:.1} us",
        count as f64 / seconds,
        at(50),
        at(99)
    );
}

struct Queue {
    stream: TcpStream,
    controller: u16,
    buffer: Vec<u8>,
    end: usize,
    out: Vec<u8>,
}

/// One command under way.
#[derive(Clone, Copy)]
struct Slot {
    block: u64,
    began: Instant,
}

impl Queue {
    fn connect(address: &str, subsystem: &str, queue: u16, controller: u16, entries: u16) -> Queue {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        let shape = Shape::new(Kind::IcReq, 0, 0, NONE);
        let request = IcReq {
            common: shape.common(0),
            version: 0.into(),
            alignment: 0,
            digests: 0,
            r2t_max: 0.into(),
            reserved: [0; 112],
        };
        stream.write_all(request.as_bytes()).unwrap();
        stream.read_exact(&mut [0; 128]).unwrap();
        let mut made =
            Queue { stream, controller, buffer: vec![0; 1 << 20], end: 0, out: Vec::new() };
        let connect = Connect { queue, entries, no_flow_control: true, keep_alive_ms: 0 };
        let data = ConnectData {
            host_id: [7; 16],
            controller: controller.into(),
            reserved_a: [0; 238],
            subsystem: fabrics::nqn_field(subsystem).unwrap(),
            host: fabrics::nqn_field(HOST).unwrap(),
            reserved_b: [0; 256],
        };
        made.push(connect.command(), data.as_bytes());
        made.controller = made.receive_completion().result as u16;
        made
    }

    /// Puts a command into what is sent next, with its data.
    fn push(&mut self, command: Command, data: &[u8]) {
        let shape = Shape::new(Kind::CapsuleCmd, data.len(), 0, NONE);
        let bytes = data.len() as u32;
        let command = match (data.is_empty(), command.sgl()) {
            (true, Some(_)) => command,
            (true, None) => command.with_sgl(Sgl::Transport { bytes: 0 }),
            (false, _) => command.with_sgl(Sgl::InCapsule { offset: 0, bytes }),
        };
        let capsule = CapsuleCmd { common: shape.common(0), command: command.to_bytes() };
        self.out.extend(capsule.as_bytes());
        self.out.extend(data);
    }

    fn flush(&mut self) {
        let mut done = 0;
        while done < self.out.len() {
            match self.stream.write(&self.out[done..]) {
                Ok(more) => done += more,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => panic!("{error}"),
            }
        }
        self.out.clear();
    }

    fn run(&mut self, command: Command) {
        self.push(command, &[]);
        self.receive_completion();
    }

    /// The answer to the only command under way.
    fn receive_completion(&mut self) -> Completion {
        self.flush();
        let mut bytes = [0; 24];
        self.stream.read_exact(&mut bytes).unwrap();
        let capsule: CapsuleResp = header(&bytes).unwrap();
        let completion = Completion::from_bytes(&capsule.completion);
        assert!(completion.status.is_success(), "{:?}", completion.status);
        completion
    }

    /// Keeps `depth` commands under way. Returns how many were answered, and how long each took.
    fn work(
        &mut self,
        depth: u16,
        writes: bool,
        until: Option<Instant>,
        most: u64,
        mut pick: impl FnMut() -> u64,
    ) -> (u64, Vec<u64>) {
        self.stream.set_nonblocking(true).unwrap();
        let mut slots = vec![Slot { block: 0, began: Instant::now() }; usize::from(depth)];
        let (mut asked, mut done) = (0_u64, 0_u64);
        let mut latencies = Vec::new();
        let mut data = vec![0; BLOCK];
        let mut free: Vec<u16> = (0..depth).collect();
        loop {
            let now = Instant::now();
            let goes_on = until.is_none_or(|until| now < until);
            while goes_on
                && asked < most
                && let Some(id) = free.pop()
            {
                let slot = Slot { block: pick(), began: now };
                slots[usize::from(id)] = slot;
                asked += 1;
                if writes {
                    fill(&mut data, slot.block);
                    self.push(Command::write(1, slot.block * 8, 8).with_id(id), &data);
                } else {
                    let read = Command::read(1, slot.block * 8, 8).with_id(id);
                    self.push(read.with_sgl(Sgl::Transport { bytes: BLOCK as u32 }), &[]);
                }
            }
            self.flush();
            if done == asked {
                return (done, latencies);
            }
            for id in self.receive(&slots) {
                done += 1;
                free.push(id);
                let took = now_since(slots[usize::from(id)].began);
                latencies.push(took);
            }
        }
    }

    /// The identifiers of commands that were answered.
    fn receive(&mut self, slots: &[Slot]) -> Vec<u16> {
        match self.stream.read(&mut self.buffer[self.end..]) {
            Ok(0) => panic!("the target has closed the connection"),
            Ok(more) => self.end += more,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Vec::new(),
            Err(error) => panic!("{error}"),
        }
        let (mut at, mut answered) = (0, Vec::new());
        while let Some(common) = header::<Common>(&self.buffer[at..self.end]) {
            let bytes = common.bytes.get() as usize;
            if self.end - at < bytes || self.end - at < COMMON_BYTES {
                break;
            }
            let pdu = &self.buffer[at..at + bytes];
            at += bytes;
            match Kind::from_byte(common.kind) {
                Some(Kind::C2hData) => {
                    let data: Data = header(pdu).unwrap();
                    let id = data.command.get();
                    check(&pdu[usize::from(common.data_at)..], slots[usize::from(id)].block);
                    assert!(common.flags & SUCCESS != 0);
                    answered.push(id);
                }
                Some(Kind::CapsuleResp) => {
                    let capsule: CapsuleResp = header(pdu).unwrap();
                    let completion = Completion::from_bytes(&capsule.completion);
                    assert!(completion.status.is_success(), "{:?}", completion.status);
                    answered.push(completion.id);
                }
                other => panic!("a target sends {other:?}"),
            }
        }
        self.buffer.copy_within(at..self.end, 0);
        self.end -= at;
        answered
    }
}

fn now_since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_nanos()).unwrap()
}

/// Each block says which it is, at both ends.
fn fill(data: &mut [u8], block: u64) {
    data[..8].copy_from_slice(&block.to_le_bytes());
    data[BLOCK - 8..].copy_from_slice(&block.to_le_bytes());
}

fn check(data: &[u8], block: u64) {
    assert_eq!(data.len(), BLOCK);
    let expected = block.to_le_bytes();
    assert!(data[..8] == expected && data[BLOCK - 8..] == expected, "block {block} is another's");
}
