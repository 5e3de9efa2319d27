//! An NVMe/TCP host that says anything (NVM Express TCP Transport 1.0, section 3; Base 2.0, 6).

use std::net::SocketAddr;

use ashlar_reactor::nvme::chap::{self, Failure, Group, MESSAGE_BYTES_MAX, Names, Offer, Secret};
use ashlar_reactor::nvme::command::{Command, Completion, Sgl};
use ashlar_reactor::nvme::fabrics::{self, ANY_CONTROLLER, Connect, ConnectData, Property};
use ashlar_reactor::nvme::pdu::{
    COMMON_BYTES, CapsuleCmd, CapsuleResp, Common, Data, Digests, IcReq, Kind, LAST, R2t, SUCCESS,
    Shape, header,
};
use zerocopy::IntoBytes;

use crate::choices::Choices;
use crate::stream::Stream;

/// The name of a hostile host.
pub const HOST: &str = "nqn.2026-01.example:hostile";
const BLOCK_BYTES: u32 = 512;
/// Blocks of the volume, or fewer.
const BLOCKS: u64 = 16 << 11;
/// Most data in a capsule that is taken.
const CAPSULE_BYTES: u32 = 16 << 10;
/// Steps of one life, at most.
const STEPS_MAX: u64 = 200;
/// Opcodes of admin commands: log page, identify, abort, features, event, keep alive, queues.
const ADMIN: [u32; 12] = [0x02, 0x06, 0x06, 0x08, 0x09, 0x0a, 0x0c, 0x18, 0x00, 0x01, 0x04, 0x05];
/// Opcodes of reads, writes, flush, compare, zeroes, deallocate, and none.
const IO: [u32; 10] = [0x02, 0x01, 0x02, 0x01, 0x00, 0x05, 0x08, 0x09, 0x0d, 0x42];

/// One life of a hostile host: connects, does harm, and goes, in the middle of anything. `Ok` says
/// nothing of the target; an error, that it could not be reached. With a secret it proves who it
/// is, more or less.
pub fn live(
    at: SocketAddr,
    subsystem: &str,
    secret: Option<&Secret>,
    mut choices: Choices,
) -> std::io::Result<()> {
    let (subsystem, one_slip_in) = (subsystem.to_owned(), choices.one_slip_in());
    let secret = secret.cloned();
    let mut host = Host { at, subsystem, secret, choices, one_slip_in, wires: Vec::new() };
    host.open()?;
    let controller = host.connect(0, ANY_CONTROLLER);
    host.prove(0)?;
    if host.choices.chance(7, 8) {
        host.send(0, fabrics::property_set(Property::Configuration, 0x46_0001), &[]);
    }
    for queue in 1..=host.choices.below(3) {
        host.open()?;
        host.connect(u16::try_from(queue).unwrap_or(1), controller);
        host.prove(host.wires.len() - 1)?;
    }
    for _ in 0..host.choices.below(STEPS_MAX) {
        if host.choices.are_over() {
            break;
        }
        host.step();
    }
    Ok(())
}

struct Wire {
    stream: Stream,
    digests: Digests,
}

struct Host {
    at: SocketAddr,
    subsystem: String,
    secret: Option<Secret>,
    choices: Choices,
    /// Of PDUs, or fields.
    one_slip_in: u64,
    /// The first is the admin queue's.
    wires: Vec<Wire>,
}

impl Host {
    fn slips(&mut self) -> bool {
        self.choices.slips(self.one_slip_in)
    }

    fn slip_or(&mut self, right: u64) -> u64 {
        if self.slips() { self.choices.number() } else { right }
    }

    /// One more connection, up to the answer to its first PDU.
    fn open(&mut self) -> std::io::Result<()> {
        let stream = Stream::tcp(self.at)?;
        self.wires.push(Wire { stream, digests: Digests::default() });
        let digests = self.choices.below(4);
        let request = IcReq {
            common: Shape::new(Kind::IcReq, 0, 0, Digests::default()).common(0),
            version: (self.slip_or(0) as u16).into(),
            alignment: self.choices.byte() % 32 * u8::from(self.choices.chance(1, 4)),
            digests: self.slip_or(digests) as u8,
            r2t_max: (self.choices.number() as u32).into(),
            reserved: [0; 112],
        };
        let wire = self.wires.len() - 1;
        self.say(wire, request.as_bytes().to_vec());
        let answer = self.wires[wire].stream.answer(size_of::<IcReq>());
        // It answers with the digests that both want.
        let agreed = answer.map_or(0, |bytes| bytes[11]);
        self.wires[wire].digests = Digests::from_byte(agreed);
        Ok(())
    }

    /// Connects the newest connection as a queue; the number of the controller that it is told.
    fn connect(&mut self, queue: u16, controller: u16) -> u16 {
        let entries = (self.slip_or(32) as u16).max(2);
        let keep_alive_ms = [0, 1, 1000][self.choices.index(3)];
        let no_flow_control = self.choices.chance(1, 2);
        let connect = Connect { queue, entries, no_flow_control, keep_alive_ms };
        let data = ConnectData {
            host_id: [7; 16],
            controller: (self.slip_or(controller.into()) as u16).into(),
            reserved_a: [0; 238],
            subsystem: fabrics::nqn_field(&self.subsystem).unwrap_or([0; 256]),
            host: fabrics::nqn_field(HOST).unwrap_or([0; 256]),
            reserved_b: [0; 256],
        };
        let wire = self.wires.len() - 1;
        self.send(wire, connect.command(), data.as_bytes());
        let its = &mut self.wires[wire];
        let answer_bytes = size_of::<CapsuleResp>() + if its.digests.header { 4 } else { 0 };
        let answer = its.stream.answer(answer_bytes);
        let capsule: Option<CapsuleResp> = answer.and_then(|bytes| header(&bytes));
        capsule.map_or(0, |its| Completion::from_bytes(&its.completion).result as u16)
    }

    /// Goes through authentication (Base 8.13.5), if it has a secret. Each message may be spoilt,
    /// repeated, or left out.
    fn prove(&mut self, wire: usize) -> std::io::Result<()> {
        let Some(secret) = self.secret.clone() else { return Ok(()) };
        let names = Names { host: HOST.into(), subsystem: self.subsystem.clone() };
        // Arithmetic in the large groups takes milliseconds, of both sides.
        let groups = if self.choices.chance(3, 4) { 1 } else { Group::ALL.len() };
        let group = Group::ALL[self.choices.index(groups)];
        let offer = Offer { groups: vec![group], ..Offer::default() };
        let mut prover = chap::Host::new(names, secret, None, offer)?;
        self.tell(wire, prover.negotiate());
        let challenge = self.hear(wire);
        let reply = prover.reply(&challenge).unwrap_or_else(|_| prover.failure(Failure::Failed));
        self.tell(wire, reply);
        let verdict = self.hear(wire);
        if let Ok(Some(last)) = prover.conclude(&verdict) {
            self.tell(wire, last);
        }
        Ok(())
    }

    fn tell(&mut self, wire: usize, mut message: Vec<u8>) {
        if self.slips() {
            self.choices.spoil(&mut message);
        }
        for _ in 0..if self.slips() { self.choices.below(3) } else { 1 } {
            let bytes = self.slip_or(message.len() as u64) as u32;
            self.send(wire, fabrics::authentication_send(bytes), &message);
            self.answer(wire);
        }
    }

    /// What the controller says next; nothing, if it does not.
    fn hear(&mut self, wire: usize) -> Vec<u8> {
        let bytes = self.slip_or(MESSAGE_BYTES_MAX as u64) as u32;
        let command = fabrics::authentication_receive(bytes);
        self.send_capsule(wire, command.with_sgl(Sgl::Transport { bytes }), &[]);
        let Some((common, pdu)) = self.answer(wire) else { return Vec::new() };
        if common.kind == Kind::C2hData as u8 && common.flags & SUCCESS == 0 {
            self.answer(wire);
        }
        pdu.get(common.data_at.into()..).unwrap_or_default().to_vec()
    }

    /// The next PDU, which has to come.
    fn answer(&mut self, wire: usize) -> Option<(Common, Vec<u8>)> {
        let its = &mut self.wires[wire].stream;
        let mut pdu = its.answer(COMMON_BYTES)?;
        let common: Common = header(&pdu)?;
        let left = (common.bytes.get() as usize).saturating_sub(COMMON_BYTES);
        pdu.extend(its.answer(left)?);
        Some((common, pdu))
    }

    /// Sends a command with its data in the capsule.
    fn send(&mut self, wire: usize, command: Command, data: &[u8]) {
        let bytes = data.len() as u32;
        let sgl = match bytes {
            0 => Sgl::Transport { bytes: 0 },
            _ => Sgl::InCapsule { offset: 0, bytes },
        };
        self.send_capsule(wire, command.with_sgl(sgl), data);
    }

    fn send_capsule(&mut self, wire: usize, command: Command, data: &[u8]) {
        let shape = Shape::new(Kind::CapsuleCmd, data.len(), 0, self.wires[wire].digests);
        let capsule = CapsuleCmd { common: shape.common(0), command: command.to_bytes() };
        self.say(wire, shape.written(&capsule, data));
    }

    fn say(&mut self, wire: usize, mut bytes: Vec<u8>) {
        if self.slips() {
            self.choices.spoil(&mut bytes);
        }
        self.wires[wire].stream.say(&bytes);
    }

    fn step(&mut self) {
        let wire = self.choices.index(self.wires.len());
        match self.choices.below(16) {
            0 => {
                let noise: Vec<u8> =
                    (0..self.choices.below(64)).map(|_| self.choices.byte()).collect();
                if self.slips() {
                    self.say(wire, noise);
                }
            }
            1 => self.fabrics(wire),
            2..=4 => self.command(0, &ADMIN),
            _ => self.command(wire, &IO),
        }
        if self.choices.chance(7, 8) {
            self.listen(wire);
        }
    }

    /// A fabrics command: a property, authentication with noise, Connect once more, a farewell.
    fn fabrics(&mut self, wire: usize) {
        let kind = [0x00, 0x01, 0x04, 0x05, 0x06, 0x08][self.choices.index(6)];
        let mut command = Command { dwords: [0; 16] };
        command.dwords[0] = u32::from(fabrics::OPCODE);
        command.dwords[1] = kind;
        for at in 10..14 {
            command.dwords[at] = self.choices.number() as u32;
        }
        let data = vec![0xa5; self.choices.index(1100)];
        let command = command.with_id(self.choices.byte().into());
        self.send(wire, command, &data);
    }

    /// One of `opcodes`, mostly right, with data in the capsule, or by R2T, or for the host.
    fn command(&mut self, wire: usize, opcodes: &[u32]) {
        let opcode = opcodes[self.choices.index(opcodes.len())];
        let blocks = 1 + self.choices.below(32) as u32;
        let place = self.choices.below(BLOCKS);
        let mut command = Command { dwords: [0; 16] };
        command.dwords[0] = opcode;
        command.dwords[1] = self.slip_or(1) as u32;
        let place = self.slip_or(place);
        (command.dwords[10], command.dwords[11]) = (place as u32, (place >> 32) as u32);
        command.dwords[12] = self.slip_or(u64::from(blocks - 1)) as u32;
        if opcodes == ADMIN {
            // Which page, feature or structure; how much of it.
            command.dwords[10] = self.choices.below(0x90) as u32 | 0x3ff << 16;
            command.dwords[11] = self.choices.below(0x200) as u32;
        }
        let bytes = self.slip_or(u64::from(blocks * BLOCK_BYTES)) as u32;
        let command = command.with_id(self.choices.byte().into());
        let has_data = matches!(opcode, 0x01 | 0x05 | 0x09);
        if has_data && bytes <= CAPSULE_BYTES && self.choices.chance(1, 2) {
            let data = vec![self.choices.byte(); bytes as usize];
            self.send(wire, command, &data);
        } else {
            self.send_capsule(wire, command.with_sgl(Sgl::Transport { bytes }), &[]);
        }
    }

    /// Takes what has come, and gives what is asked for by it.
    fn listen(&mut self, wire: usize) {
        self.wires[wire].stream.listen();
        loop {
            let its = &mut self.wires[wire];
            let Some(common): Option<Common> = header(&its.stream.fetched) else { return };
            let bytes = common.bytes.get() as usize;
            if bytes < COMMON_BYTES || its.stream.fetched.len() < bytes {
                return;
            }
            let pdu: Vec<u8> = its.stream.fetched.drain(..bytes).collect();
            if common.kind == Kind::R2t as u8
                && let Some(asked) = header::<R2t>(&pdu)
            {
                self.give(wire, &asked);
            }
        }
    }

    /// What an R2T asks for, in one or two PDUs; or something else.
    fn give(&mut self, wire: usize, asked: &R2t) {
        let len = self.slip_or(asked.len.get().into()).min(256 << 10) as u32;
        let first = if self.choices.chance(1, 2) { len } else { len / 2 / 4 * 4 };
        for (from, to) in [(0, first), (first, len)] {
            if from == to {
                continue;
            }
            let data = vec![self.choices.byte(); (to - from) as usize];
            let shape = Shape::new(Kind::H2cData, data.len(), 0, self.wires[wire].digests);
            let flags = if self.slip_or(u64::from(to == len)) > 0 { LAST } else { 0 };
            let head = Data {
                common: shape.common(flags),
                command: (self.slip_or(asked.command.get().into()) as u16).into(),
                tag: (self.slip_or(asked.tag.get().into()) as u16).into(),
                offset: (self.slip_or((asked.offset.get() + from).into()) as u32).into(),
                len: (to - from).into(),
                reserved: [0; 4],
            };
            self.say(wire, shape.written(&head, &data));
        }
    }
}
