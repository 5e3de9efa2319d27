//! An NVMe/TCP host of the test's own making: one connection, one thread, no more than the wire.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use ashlar_reactor::nvme::chap::{self, Unproven};
use ashlar_reactor::nvme::command::{Command, Completion, Sgl, Status};
use ashlar_reactor::nvme::fabrics::{
    self, ANY_CONTROLLER, AUTHENTICATE, Connect, ConnectData, Property, authentication_receive,
    authentication_send,
};
use ashlar_reactor::nvme::pdu::{
    CapsuleCmd, CapsuleResp, Common, Data, Digests, IcReq, Kind, LAST, R2t, SUCCESS, Shape,
    TermReq, crc32c, header,
};
use zerocopy::IntoBytes;

use crate::rig::PATIENCE;

pub const HOST: &str = "nqn.2026-01.example:host-a";
/// Most data that the target takes in a capsule.
pub const CAPSULE: usize = 16 << 10;

/// What a host chooses.
#[derive(Clone, Copy)]
pub struct Choice {
    pub digests: Digests,
    pub alignment: u8,
    pub flow_control: bool,
    pub keep_alive_ms: u32,
}

impl Choice {
    pub const PLAIN: Choice = Choice {
        digests: Digests { header: false, data: false },
        alignment: 0,
        flow_control: false,
        keep_alive_ms: 0,
    };
}

/// One PDU of the target.
pub struct Pdu {
    pub kind: Kind,
    pub flags: u8,
    pub head: Vec<u8>,
    pub data: Vec<u8>,
}

pub struct Wire {
    pub stream: TcpStream,
    pub digests: Digests,
    choice: Choice,
    next_id: u16,
    /// Data for commands whose R2T is to come, by identifier.
    outgoing: Vec<(u16, Vec<u8>)>,
    /// What came while something else was waited for.
    early: VecDeque<(Completion, Vec<u8>)>,
    partial: Vec<(u16, Vec<u8>)>,
    /// What Connect was answered says so.
    pub has_to_authenticate: bool,
}

/// Why nothing came.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    Closed,
    /// The target said why: FES and FEI.
    Term(u16, u32),
    /// It did not say anything in time.
    Silent,
}

impl Wire {
    /// Agrees on the connection, and no more.
    pub fn open(at: SocketAddr, choice: Choice) -> Wire {
        Wire::over(TcpStream::connect(at).unwrap(), choice)
    }

    pub fn over(stream: TcpStream, choice: Choice) -> Wire {
        Wire::try_over(stream, choice).expect("an answer to the first PDU")
    }

    /// `None`: the target has hung up.
    pub fn try_over(stream: TcpStream, choice: Choice) -> Option<Wire> {
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut wire = Wire {
            stream,
            digests: Digests::default(),
            choice,
            next_id: 1,
            outgoing: Vec::new(),
            early: VecDeque::new(),
            partial: Vec::new(),
            has_to_authenticate: false,
        };
        wire.send_raw(&hello(choice));
        let answer = wire.receive_pdu().ok()?;
        assert_eq!(answer.kind, Kind::IcResp);
        wire.digests = choice.digests;
        Some(wire)
    }

    pub fn send_raw(&mut self, bytes: &[u8]) {
        // A target that has hung up is noticed when something is read.
        let _ = self.stream.write_all(bytes);
    }

    fn read(&mut self, len: usize) -> Result<Vec<u8>, End> {
        let mut bytes = vec![0; len];
        match self.stream.read_exact(&mut bytes) {
            Ok(()) => Ok(bytes),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Err(End::Silent),
            Err(_) => Err(End::Closed),
        }
    }

    pub fn receive_pdu(&mut self) -> Result<Pdu, End> {
        let mut bytes = self.read(8)?;
        let common: Common = header(&bytes).unwrap();
        let shape = Shape::read(&common, self.digests).expect("targets send what can be read");
        bytes.extend(self.read(shape.head_bytes() - 8)?);
        shape.check_head(&bytes).expect("its digest fits");
        if shape.kind == Kind::C2hTermReq {
            let term: TermReq = header(&bytes).unwrap();
            return Err(End::Term(term.reason.get(), term.detail.get()));
        }
        bytes.extend(self.read(shape.data_at - shape.head_bytes())?);
        let data = self.read(shape.data_bytes)?;
        if shape.data_digest {
            assert_eq!(self.read(4)?, crc32c(&data).to_le_bytes(), "the data's digest fits");
        }
        if shape.data_bytes > 0 {
            let unit = 4 * (usize::from(self.choice.alignment) + 1);
            assert!(shape.data_at.is_multiple_of(unit), "data at {}", shape.data_at);
        }
        Ok(Pdu { kind: shape.kind, flags: common.flags, head: bytes, data })
    }

    /// Reads whatever comes. False: nothing does any more.
    pub fn receive_loosely(&mut self) -> bool {
        self.stream.read(&mut [0; 4096]).is_ok_and(|more| more > 0)
    }

    /// The bytes of a command, with its data if that fits.
    pub fn capsule(&self, command: Command, data: &[u8]) -> Vec<u8> {
        let shape = Shape::new(Kind::CapsuleCmd, data.len(), 0, self.digests);
        let head = CapsuleCmd { common: shape.common(0), command: command.to_bytes() };
        shape.written(&head, data)
    }

    /// Sends a command for `len` bytes from the target; its identifier.
    pub fn ask(&mut self, command: Command, len: usize) -> u16 {
        self.submit(command, Sgl::Transport { bytes: len as u32 }, &[])
    }

    /// Sends a command with data for the target, in its capsule or when that asks for it.
    pub fn give(&mut self, command: Command, data: &[u8], in_capsule: bool) -> u16 {
        let bytes = data.len() as u32;
        if in_capsule {
            return self.submit(command, Sgl::InCapsule { offset: 0, bytes }, data);
        }
        let id = self.submit(command, Sgl::Transport { bytes }, &[]);
        self.outgoing.push((id, data.to_vec()));
        id
    }

    fn submit(&mut self, command: Command, sgl: Sgl, data: &[u8]) -> u16 {
        let id = self.next_id;
        self.next_id = if id == 0x7fff { 1 } else { id + 1 };
        let bytes = self.capsule(command.with_sgl(sgl).with_id(id), data);
        self.send_raw(&bytes);
        id
    }

    /// What a command has come to; answers of others are kept.
    pub fn wait(&mut self, id: u16) -> Result<(Completion, Vec<u8>), End> {
        loop {
            if let Some(at) = self.early.iter().position(|(completion, _)| completion.id == id) {
                return Ok(self.early.remove(at).unwrap());
            }
            let answer = self.next()?;
            self.early.push_back(answer);
        }
    }

    /// The next completion, whosever it is, with its data.
    pub fn next(&mut self) -> Result<(Completion, Vec<u8>), End> {
        loop {
            let pdu = self.receive_pdu()?;
            match pdu.kind {
                Kind::C2hData => {
                    let data: Data = header(&pdu.head).unwrap();
                    let id = data.command.get();
                    if pdu.flags & SUCCESS != 0 {
                        assert!(pdu.flags & LAST != 0 && !self.choice.flow_control);
                        return Ok((success(id), pdu.data));
                    }
                    self.partial.push((id, pdu.data));
                }
                Kind::R2t => {
                    let ask: R2t = header(&pdu.head).unwrap();
                    self.answer(&ask);
                }
                Kind::CapsuleResp => {
                    let capsule: CapsuleResp = header(&pdu.head).unwrap();
                    let completion = Completion::from_bytes(&capsule.completion);
                    let at = self.partial.iter().position(|(id, _)| *id == completion.id);
                    let data = at.map(|at| self.partial.remove(at).1).unwrap_or_default();
                    return Ok((completion, data));
                }
                Kind::IcReq
                | Kind::IcResp
                | Kind::H2cTermReq
                | Kind::C2hTermReq
                | Kind::CapsuleCmd
                | Kind::H2cData => panic!("a target sends {:?}", pdu.kind),
            }
        }
    }

    /// Sends what was asked for, in two parts where it can.
    fn answer(&mut self, ask: &R2t) {
        let at = self.outgoing.iter().position(|(id, _)| *id == ask.command.get());
        let Some(at) = at else { return };
        let (_, data) = self.outgoing.remove(at);
        assert_eq!((ask.offset.get(), ask.len.get() as usize), (0, data.len()));
        let middle = data.len() / 2 / 512 * 512;
        let mut bytes = Vec::new();
        for range in [0..middle, middle..data.len()] {
            if !range.is_empty() {
                let part =
                    DataPart { command: ask.command.get(), tag: ask.tag.get(), at: range.start };
                bytes.extend(self.data_pdu(part, &data[range.clone()], range.end == data.len()));
            }
        }
        self.send_raw(&bytes);
    }

    pub fn data_pdu(&self, part: DataPart, data: &[u8], last: bool) -> Vec<u8> {
        let shape = Shape::new(Kind::H2cData, data.len(), 0, self.digests);
        let head = Data {
            common: shape.common(if last { LAST } else { 0 }),
            command: part.command.into(),
            tag: part.tag.into(),
            offset: (part.at as u32).into(),
            len: (data.len() as u32).into(),
            reserved: [0; 4],
        };
        shape.written(&head, data)
    }

    pub fn run(&mut self, command: Command, len: usize) -> (Status, Vec<u8>) {
        let id = if len == 0 {
            self.submit(command, Sgl::Transport { bytes: 0 }, &[])
        } else {
            self.ask(command, len)
        };
        let (completion, data) = self.wait(id).expect("an answer");
        (completion.status, data)
    }

    pub fn put(&mut self, command: Command, data: &[u8], in_capsule: bool) -> Status {
        let id = self.give(command, data, in_capsule);
        self.wait(id).expect("an answer").0.status
    }

    /// Connects a queue; the controller's number, or why not.
    pub fn connect(
        &mut self,
        names: (&str, &str),
        queue: u16,
        controller: u16,
    ) -> Result<u16, (Status, u32)> {
        self.try_connect(names, queue, controller).expect("an answer to Connect")
    }

    /// The same. `None`: the target has hung up.
    pub fn try_connect(
        &mut self,
        (subsystem, host): (&str, &str),
        queue: u16,
        controller: u16,
    ) -> Option<Result<u16, (Status, u32)>> {
        let connect = Connect {
            queue,
            entries: 32,
            no_flow_control: !self.choice.flow_control,
            keep_alive_ms: if queue == 0 { self.choice.keep_alive_ms } else { 0 },
        };
        let data = connect_data((subsystem, host), controller);
        let (completion, _) = self.ask_to_connect(connect, &data)?;
        if !completion.status.is_success() {
            return Some(Err((completion.status, completion.result)));
        }
        self.has_to_authenticate = completion.result >> 16 == AUTHENTICATE >> 16;
        assert!(self.has_to_authenticate || completion.result >> 16 == 0);
        Some(Ok(completion.result as u16))
    }

    /// What Connect comes to. `None`: the target has hung up.
    pub fn ask_to_connect(
        &mut self,
        connect: Connect,
        data: &ConnectData,
    ) -> Option<(Completion, Vec<u8>)> {
        let id = self.give(connect.command(), data.as_bytes(), true);
        self.wait(id).ok()
    }

    /// Sends a message of the authentication.
    pub fn tell(&mut self, message: &[u8], in_capsule: bool) -> Status {
        self.put(authentication_send(message.len() as u32), message, in_capsule)
    }

    /// Fetches one.
    pub fn hear(&mut self) -> Vec<u8> {
        let (status, message) = self.run(authentication_receive(4096), 4096);
        assert_eq!(status, Status::SUCCESS);
        message
    }

    /// Proves who it is, and has the target do the same if that was asked of `host`.
    pub fn prove(&mut self, host: &mut chap::Host) -> Result<(), Unproven> {
        assert_eq!(self.tell(&host.negotiate(), true), Status::SUCCESS);
        let reply = host.reply(&self.hear())?;
        assert_eq!(self.tell(&reply, false), Status::SUCCESS);
        if let Some(last) = host.conclude(&self.hear())? {
            assert_eq!(self.tell(&last, true), Status::SUCCESS);
        }
        Ok(())
    }

    pub fn enable(&mut self) {
        let set = fabrics::property_set(Property::Configuration, 0x46_0001);
        assert!(self.run(set, 0).0.is_success());
        assert_eq!(self.property(Property::Status) & 1, 1, "it is ready");
    }

    /// Up to how many blocks a write to namespace 1 is atomic across a power failure (NVM Express
    /// Base 2.0, NAWUPF).
    pub fn blocks_atomic(&mut self) -> u32 {
        let (status, page) = self.run(Command::identify_namespace(1), 4096);
        assert!(status.is_success());
        u32::from(u16::from_le_bytes([page[36], page[37]])) + 1
    }

    pub fn property(&mut self, property: Property) -> u64 {
        let id = self.submit(fabrics::property_get(property), Sgl::Transport { bytes: 0 }, &[]);
        let (completion, _) = self.wait(id).unwrap();
        assert!(completion.status.is_success());
        u64::from(completion.result) | u64::from(completion.result_high) << 32
    }
}

/// Where in the data of a command a PDU's is.
#[derive(Clone, Copy)]
pub struct DataPart {
    pub command: u16,
    pub tag: u16,
    pub at: usize,
}

pub fn connect_data((subsystem, host): (&str, &str), controller: u16) -> ConnectData {
    ConnectData {
        host_id: host_id(host),
        controller: controller.into(),
        reserved_a: [0; 238],
        subsystem: fabrics::nqn_field(subsystem).unwrap(),
        host: fabrics::nqn_field(host).unwrap(),
        reserved_b: [0; 256],
    }
}

pub fn host_id(host: &str) -> [u8; 16] {
    std::array::from_fn(|i| host.as_bytes()[host.len() - 1 - i % host.len()])
}

fn success(id: u16) -> Completion {
    Completion {
        result: 0,
        result_high: 0,
        submission_head: 0,
        queue: 0,
        id,
        phase: false,
        status: Status::SUCCESS,
    }
}

pub fn hello(choice: Choice) -> Vec<u8> {
    let shape = Shape::new(Kind::IcReq, 0, 0, Digests::default());
    let request = IcReq {
        common: shape.common(0),
        version: 0.into(),
        alignment: choice.alignment,
        digests: choice.digests.to_byte(),
        r2t_max: 0.into(),
        reserved: [0; 112],
    };
    request.as_bytes().to_vec()
}

/// A controller with its admin queue and one I/O queue.
pub struct Host {
    pub admin: Wire,
    pub io: Wire,
    pub controller: u16,
}

impl Host {
    pub fn connect(at: SocketAddr, subsystem: &str, choice: Choice) -> Host {
        Host::named(at, (subsystem, HOST), choice)
    }

    pub fn named(at: SocketAddr, names: (&str, &str), choice: Choice) -> Host {
        let mut admin = Wire::open(at, choice);
        let controller = admin.connect(names, 0, ANY_CONTROLLER).unwrap();
        admin.enable();
        let mut io = Wire::open(at, choice);
        assert_eq!(io.connect(names, 1, controller), Ok(controller));
        Host { admin, io, controller }
    }

    pub fn read(&mut self, namespace: u32, block: u64, blocks: u32) -> Vec<u8> {
        let read = Command::read(namespace, block, blocks);
        let (status, data) = self.io.run(read, blocks as usize * 512);
        assert!(status.is_success(), "{status:?}");
        assert_eq!(data.len(), blocks as usize * 512);
        data
    }

    pub fn write(&mut self, namespace: u32, block: u64, data: &[u8]) {
        let write = Command::write(namespace, block, (data.len() / 512) as u32);
        let status = self.io.put(write, data, data.len() <= CAPSULE && block.is_multiple_of(2));
        assert!(status.is_success(), "{status:?}");
    }
}
