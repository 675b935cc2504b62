// SPDX-License-Identifier: Apache-2.0
//! Calls over a connection: requests and responses by number, several under way at a time, with a deadline each (Beluga section 6.2).
//!
//! The number of a call is never used again, so a response that comes after its call's deadline finds no call and is dropped. A response
//! may come before that of an earlier call. Fences are batched: [`Client::submit`] and [`Server::reply`] only write, `flush` ends a group.

use super::{Connection, LOOKS, Receiver, Sender, deadline_ns, wait_until};
use crate::error::{Error, Result};
use crate::fault::mutant;
use bytemuck::{Pod, Zeroable};
use std::collections::VecDeque;

/// Most calls under way on one connection.
pub const MAX_CALLS: usize = 1 << 12;
/// Bits of a call's number that hold its place in the table.
const PLACE_BITS: u32 = 16;
const _: () = assert!(MAX_CALLS <= 1 << PLACE_BITS);

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
struct CallHead {
    /// Number of the call.
    call: u64,
    /// [`CallHead::REQUEST`] or [`CallHead::RESPONSE`].
    kind: u32,
    /// In a response: what the server says of it.
    status: u32,
}

impl CallHead {
    const REQUEST: u32 = 0x7265_7131;
    const RESPONSE: u32 = 0x7265_7331;

    fn split(message: &[u8], kind: u32) -> Option<(CallHead, &[u8])> {
        let (head, content) = message.split_first_chunk::<{ size_of::<CallHead>() }>()?;
        let head: CallHead = bytemuck::pod_read_unaligned(head);
        (head.kind == kind).then_some((head, content))
    }
}

/// Bytes of a message that a request or response takes besides its content.
pub const HEAD_BYTES: usize = size_of::<CallHead>();

/// A call under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallId(u64);

/// What became of a call.
#[derive(Debug)]
pub struct Completion {
    /// The call.
    pub call: CallId,
    /// The status that the server gave, or [`Error::Timeout`].
    pub status: Result<u32>,
}

#[derive(Default)]
struct PendingCall {
    /// 0 = free.
    number: u64,
    deadline_ns: u64,
    timeout_ms: u64,
    /// Set once the response is in `response`, or the deadline has passed.
    done: Option<Option<u32>>,
    response: Vec<u8>,
}

/// The calling end of a connection.
pub struct Client {
    sender: Sender,
    receiver: Receiver,
    calls: Vec<PendingCall>,
    free: Vec<usize>,
    /// Places of calls that are done and not collected.
    done: VecDeque<usize>,
    numbers: u64,
    /// No call's deadline is before.
    earliest_ns: u64,
    idle: u32,
    message: Vec<u8>,
}

impl Client {
    /// Calls over `connection`, at most `depth` at a time.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a depth of 0 or more than [`MAX_CALLS`].
    pub fn new(connection: Connection, depth: usize) -> Result<Client> {
        if depth == 0 || depth > MAX_CALLS {
            return Err(Error::Invalid(format!("{depth} calls at a time: 1 to {MAX_CALLS} can be")));
        }
        let (sender, receiver) = connection.split();
        Ok(Client {
            sender,
            receiver,
            calls: (0..depth).map(|_| PendingCall::default()).collect(),
            free: (0..depth).rev().collect(),
            done: VecDeque::with_capacity(depth),
            numbers: 0,
            earliest_ns: u64::MAX,
            idle: 0,
            message: Vec::new(),
        })
    }

    fn now_ns(&self) -> u64 {
        self.sender.link().rings().platform().now_ns()
    }

    /// Calls and waits for the response, which replaces the content of `response`. Returns the status that the server gave.
    ///
    /// # Errors
    /// [`Error::Timeout`]: the server may have done it all the same; [`Error::PeerGone`]; those of [`Client::submit`].
    pub fn call(&mut self, request: &[u8], response: &mut Vec<u8>, timeout_ms: u64) -> Result<u32> {
        let call = self.submit(request, timeout_ms)?;
        self.flush();
        self.wait(call, response)
    }

    /// Begins a call without a fence. The deadline counts from here, and covers a wait for room in the ring.
    ///
    /// # Errors
    /// [`Error::Full`] when as many calls are under way, or done and not collected, as there may be; [`Error::TooLarge`];
    /// [`Error::Timeout`] when the ring had no room for so long; [`Error::PeerGone`], [`Error::PeerClosed`].
    pub fn submit(&mut self, request: &[u8], timeout_ms: u64) -> Result<CallId> {
        let Some(&place) = self.free.last() else {
            let advice = "collect the responses of earlier calls first";
            return Err(Error::Full { what: "the table of calls under way", limit: self.calls.len() as u64, advice });
        };
        let deadline_ns = self.now_ns().saturating_add(timeout_ms.saturating_mul(1_000_000));
        self.numbers += 1;
        let number = self.numbers << PLACE_BITS | place as u64;
        let head = CallHead { call: number, kind: CallHead::REQUEST, status: 0 };
        self.push(&head, request, deadline_ns, timeout_ms)?;
        self.free.pop();
        if let Some(call) = self.calls.get_mut(place) {
            (call.number, call.deadline_ns, call.timeout_ms, call.done) = (number, deadline_ns, timeout_ms, None);
        }
        self.earliest_ns = self.earliest_ns.min(deadline_ns);
        Ok(CallId(number))
    }

    fn push(&mut self, head: &CallHead, request: &[u8], deadline_ns: u64, timeout_ms: u64) -> Result<()> {
        if self.sender.try_push(&[bytemuck::bytes_of(head), request])? {
            return Ok(());
        }
        let rings = self.sender.link().rings().clone();
        let pushed = wait_until(rings.platform(), deadline_ns, || {
            // The server may wait for room for its responses before it takes requests.
            self.receive_some()?;
            Ok(self.sender.try_push(&[bytemuck::bytes_of(head), request])?.then_some(()))
        })?;
        pushed.ok_or_else(|| Error::Timeout { what: format!("room for a request to {}", self.sender.link().peer()), timeout_ms })
    }

    /// Makes every call begun so far visible to the server.
    pub fn flush(&mut self) {
        self.sender.flush();
    }

    /// Waits for a call begun before.
    ///
    /// # Errors
    /// As [`Client::call`]; [`Error::NotFound`] when the call was collected already.
    pub fn wait(&mut self, call: CallId, response: &mut Vec<u8>) -> Result<u32> {
        let place = place_of(call.0);
        let Some(deadline_ns) = self.calls.get(place).filter(|of| of.number == call.0).map(|of| of.deadline_ns) else {
            return Err(Error::NotFound(format!("call {} (collected before?)", call.0)));
        };
        let rings = self.sender.link().rings().clone();
        // The deadline is that of the call, which ends it; this one only bounds the wait.
        wait_until(rings.platform(), deadline_ns.saturating_add(1), || {
            let is_done = |client: &Self| client.calls.get(place).is_some_and(|of| of.done.is_some());
            if !is_done(self) {
                self.receive_some()?;
            }
            Ok(is_done(self).then_some(()))
        })?;
        self.expire();
        self.done.retain(|done| *done != place);
        self.collect(place, response).status
    }

    /// The next call that is done, if one is; its response replaces the content of `response`.
    ///
    /// # Errors
    /// [`Error::PeerGone`], [`Error::PeerClosed`], [`Error::Protocol`]: no call that is under way will be answered.
    pub fn poll(&mut self, response: &mut Vec<u8>) -> Result<Option<Completion>> {
        if self.done.is_empty() {
            self.receive_some()?;
        }
        Ok(self.done.pop_front().map(|place| self.collect(place, response)))
    }

    fn collect(&mut self, place: usize, response: &mut Vec<u8>) -> Completion {
        response.clear();
        let Some(call) = self.calls.get_mut(place) else { return Completion { call: CallId(0), status: Err(Error::Closed) } };
        let number = std::mem::take(&mut call.number);
        let timeout_ms = call.timeout_ms;
        let status = match call.done.take() {
            Some(Some(status)) => {
                std::mem::swap(response, &mut call.response);
                Ok(status)
            }
            _ => Err(Error::Timeout { what: format!("a response from {}", self.sender.link().peer()), timeout_ms }),
        };
        self.free.push(place);
        Completion { call: CallId(number), status }
    }

    /// Takes the responses that have arrived, and ends calls whose deadline has passed when none has for a while.
    fn receive_some(&mut self) -> Result<()> {
        // No further than the lines fetched together: one more look at the pool would delay these.
        for first in [true].into_iter().chain(std::iter::repeat_n(false, self.calls.len())) {
            if !first && !self.receiver.has_fetched() {
                break;
            }
            if !self.receiver.try_recv(&mut self.message)? {
                self.idle = self.idle.wrapping_add(1);
                if self.idle.is_multiple_of(LOOKS as u32) {
                    self.expire();
                }
                break;
            }
            let Some((head, content)) = CallHead::split(&self.message, CallHead::RESPONSE) else {
                return Err(self.sender.link().broken("a message that is no response"));
            };
            let place = place_of(head.call);
            // One that comes too late finds another call in its place, or none.
            let is_awaited = |call: &PendingCall| call.number == head.call || (mutant!("ring.rpc_any_call") && call.number != 0);
            if let Some(call) = self.calls.get_mut(place).filter(|call| is_awaited(call) && call.done.is_none()) {
                call.done = Some(Some(head.status));
                call.response.clear();
                call.response.extend_from_slice(content);
                self.done.push_back(place);
            }
        }
        Ok(())
    }

    fn expire(&mut self) {
        let now_ns = self.now_ns();
        if now_ns < self.earliest_ns {
            return;
        }
        self.earliest_ns = u64::MAX;
        for (place, call) in self.calls.iter_mut().enumerate() {
            if call.number == 0 || call.done.is_some() {
                continue;
            }
            if call.deadline_ns <= now_ns {
                call.done = Some(None);
                self.done.push_back(place);
            } else {
                self.earliest_ns = self.earliest_ns.min(call.deadline_ns);
            }
        }
    }
}

fn place_of(number: u64) -> usize {
    (number & ((1 << PLACE_BITS) - 1)) as usize
}

/// A request that waits for its response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

/// The responder of a connection.
pub struct Server {
    sender: Sender,
    receiver: Receiver,
    message: Vec<u8>,
    request: Vec<u8>,
    response: Vec<u8>,
}

impl Server {
    /// Answers over `connection`.
    pub fn new(connection: Connection) -> Server {
        let (sender, receiver) = connection.split();
        Server { sender, receiver, message: Vec::new(), request: Vec::new(), response: Vec::new() }
    }

    /// The next request, if one has arrived; it replaces the content of `request`. Requests may be answered in any order.
    ///
    /// # Errors
    /// [`Error::PeerClosed`], [`Error::PeerGone`], [`Error::Protocol`]: no more requests will come.
    pub fn next(&mut self, request: &mut Vec<u8>) -> Result<Option<Ticket>> {
        if !self.receiver.try_recv(&mut self.message)? {
            return Ok(None);
        }
        let Some((head, content)) = CallHead::split(&self.message, CallHead::REQUEST) else {
            return Err(self.sender.link().broken("a message that is no request"));
        };
        request.clear();
        request.extend_from_slice(content);
        Ok(Some(Ticket(head.call)))
    }

    /// Answers a request without a fence, waiting for room in the ring.
    ///
    /// # Errors
    /// [`Error::Timeout`] when the client did not receive earlier responses for so long; [`Error::TooLarge`]; [`Error::PeerGone`].
    pub fn reply(&mut self, ticket: Ticket, status: u32, response: &[u8], timeout_ms: u64) -> Result<()> {
        let head = CallHead { call: ticket.0, kind: CallHead::RESPONSE, status };
        if self.sender.try_push(&[bytemuck::bytes_of(&head), response])? {
            return Ok(());
        }
        let rings = self.sender.link().rings().clone();
        let deadline_ns = deadline_ns(rings.platform(), timeout_ms);
        let pushed =
            wait_until(rings.platform(), deadline_ns, || Ok(self.sender.try_push(&[bytemuck::bytes_of(&head), response])?.then_some(())))?;
        pushed.ok_or_else(|| Error::Timeout { what: format!("room for a response to {}", self.sender.link().peer()), timeout_ms })
    }

    /// Makes every response given so far visible to the client.
    pub fn flush(&mut self) {
        self.sender.flush();
    }

    /// Answers requests that have arrived, at most `most`, with one fence; returns how many. `handler` gets the request
    /// and an empty response to fill, and returns the status.
    ///
    /// # Errors
    /// Those of [`Server::next`] and [`Server::reply`].
    pub fn serve(&mut self, most: usize, timeout_ms: u64, mut handler: impl FnMut(&[u8], &mut Vec<u8>) -> u32) -> Result<usize> {
        let (mut request, mut response) = (std::mem::take(&mut self.request), std::mem::take(&mut self.response));
        let mut served = 0;
        let mut result = Ok(());
        // No further than the lines fetched together: one more look at the pool would hold up the responses.
        while served < most && result.is_ok() && (served == 0 || self.receiver.has_fetched()) {
            match self.next(&mut request) {
                Ok(Some(ticket)) => {
                    response.clear();
                    let status = handler(&request, &mut response);
                    result = self.reply(ticket, status, &response, timeout_ms);
                    served += 1;
                }
                Ok(None) => break,
                Err(error) => result = Err(error),
            }
        }
        (self.request, self.response) = (request, response);
        self.flush();
        result.map(|()| served)
    }
}
