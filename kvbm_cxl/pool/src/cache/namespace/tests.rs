// SPDX-License-Identifier: Apache-2.0
use super::*;
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

fn text() -> impl Strategy<Value = String> {
    // Few letters, so that neighbours are often equal, empty, or each other's continuation.
    prop_oneof![Just(String::new()), "[ab]{1,3}", "\\PC{0,12}"]
}

prop_compose! {
    fn fields()(
        texts in vec(text(), 4),
        numbers in vec(prop_oneof![0..3_u32, any::<u32>()], 7),
        adapters in vec(text(), 0..4),
        salt in vec(any::<u8>(), 0..20),
        extra in btree_map(text(), text(), 0..4),
    ) -> NamespaceFields {
        let mut texts = texts.into_iter();
        let mut text = || texts.next().unwrap_or_default();
        NamespaceFields {
            model: text(), revision: text(), dtype: text(), layout: text(),
            first_layer: numbers[0], layer_count: numbers[1], kv_head_count: numbers[2], head_size: numbers[3],
            block_tokens: numbers[4], tp_rank: numbers[5], tp_size: numbers[6],
            adapters, tenant_salt: Salt(salt), extra,
        }
    }
}

/// Reads an encoding back. That this works for every description shows that no two of them encode alike.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let (head, rest) = self.0.split_at(len);
        self.0 = rest;
        head.to_vec()
    }

    fn number(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes(4).try_into().unwrap())
    }

    fn len(&mut self) -> usize {
        u64::from_le_bytes(self.bytes(8).try_into().unwrap()) as usize
    }

    fn string(&mut self) -> String {
        let len = self.len();
        String::from_utf8(self.bytes(len)).unwrap()
    }

    fn fields(mut self) -> NamespaceFields {
        assert_eq!(self.bytes(NAMESPACE_DOMAIN.len()), NAMESPACE_DOMAIN);
        let read = NamespaceFields {
            model: self.string(),
            revision: self.string(),
            dtype: self.string(),
            first_layer: self.number(),
            layer_count: self.number(),
            kv_head_count: self.number(),
            head_size: self.number(),
            block_tokens: self.number(),
            layout: self.string(),
            tp_rank: self.number(),
            tp_size: self.number(),
            adapters: (0..self.len()).map(|_| self.string()).collect(),
            tenant_salt: {
                let len = self.len();
                Salt(self.bytes(len))
            },
            extra: (0..self.len()).map(|_| (self.string(), self.string())).collect(),
        };
        assert!(self.0.is_empty(), "bytes that belong to no field");
        read
    }
}

fn llama() -> NamespaceFields {
    NamespaceFields {
        model: "meta-llama/Llama-3.1-8B".into(),
        revision: "d04e592b".into(),
        dtype: "bfloat16".into(),
        first_layer: 0,
        layer_count: 32,
        kv_head_count: 8,
        head_size: 128,
        block_tokens: 16,
        layout: "layer-kv-token-head".into(),
        tp_rank: 1,
        tp_size: 4,
        adapters: vec!["sql@3".into()],
        tenant_salt: Salt(b"tenant".to_vec()),
        extra: BTreeMap::from([("rope_scaling".into(), "8.0".into())]),
    }
}

/// A change, and what it changes.
type Changed = (&'static str, fn(&mut NamespaceFields));

/// Changes of a single field each.
fn changes() -> [Changed; 15] {
    [
        ("model", |f| f.model.push('x')),
        ("revision", |f| f.revision.push('x')),
        ("dtype", |f| f.dtype.push('x')),
        ("first_layer", |f| f.first_layer ^= 1),
        ("layer_count", |f| f.layer_count ^= 1 << 31),
        ("kv_head_count", |f| f.kv_head_count ^= 1),
        ("head_size", |f| f.head_size ^= 1),
        ("block_tokens", |f| f.block_tokens ^= 1),
        ("layout", |f| f.layout.push('x')),
        ("tp_rank", |f| f.tp_rank ^= 1),
        ("tp_size", |f| f.tp_size ^= 1),
        ("one adapter more", |f| f.adapters.push(String::new())),
        ("adapters turned round", |f| f.adapters.insert(0, "another".into())),
        ("tenant_salt", |f| f.tenant_salt.0.push(0)),
        ("one pair more", |f| drop(f.extra.insert("a name of its own".into(), String::new()))),
    ]
}

proptest! {
    #[test]
    fn an_encoding_reads_back_as_what_was_encoded(fields in fields()) {
        prop_assert_eq!(Reader(&fields.encode()).fields(), fields);
    }

    #[test]
    fn any_single_change_makes_another_namespace(fields in fields()) {
        let mut seen = vec![("unchanged", fields.namespace())];
        for (what, change) in changes() {
            let mut changed = fields.clone();
            change(&mut changed);
            let namespace = changed.namespace();
            for (other, known) in &seen {
                prop_assert_ne!(namespace, *known, "{} and {}", what, other);
            }
            seen.push((what, namespace));
        }
    }

    #[test]
    fn bytes_that_move_between_neighbours_count(fields in fields()) {
        // The concatenation of the texts stays the same, only the border between them moves.
        let mut moved = fields.clone();
        moved.revision = format!("{}{}", moved.model, moved.revision);
        moved.model.clear();
        prop_assert!(moved == fields || moved.namespace() != fields.namespace());
        let mut swapped = fields.clone();
        std::mem::swap(&mut swapped.model, &mut swapped.revision);
        prop_assert!(swapped == fields || swapped.namespace() != fields.namespace());
        let mut turned = fields.clone();
        turned.adapters.reverse();
        prop_assert!(turned == fields || turned.namespace() != fields.namespace());
        let turned_pairs = |fields: &NamespaceFields| fields.extra.iter().map(|(name, value)| (value.clone(), name.clone())).collect();
        let turned = NamespaceFields { extra: turned_pairs(&fields), ..fields.clone() };
        prop_assert!(turned == fields || turned.namespace() != fields.namespace());
    }

    #[test]
    fn names_read_back_from_their_text(bytes in any::<[u8; 16]>()) {
        prop_assert_eq!(BlockKey(bytes).to_string().parse::<BlockKey>().unwrap(), BlockKey(bytes));
        prop_assert_eq!(Namespace(bytes).to_string().to_uppercase().parse::<Namespace>().unwrap(), Namespace(bytes));
        prop_assert_eq!(BlockKey(bytes).to_string()[..2].to_owned(), format!("{:02x}", bytes[0]));
    }

    #[test]
    fn a_key_depends_on_all_it_is_made_of(
        parent in proptest::option::of(any::<[u8; 16]>()),
        tokens in vec(any::<u32>(), 0..140),
        extra in vec(any::<u8>(), 0..9),
        place in any::<usize>(),
    ) {
        let parent = parent.map(BlockKey);
        let key = chain(parent, &tokens, &extra);
        prop_assert_eq!(chain(parent, &tokens, &extra), key);
        prop_assert_ne!(chain(Some(key), &tokens, &extra), key);
        prop_assert_ne!(chain(parent, &tokens, &[&extra[..], &[0]].concat()), key);
        prop_assert_ne!(chain(parent, &[&tokens[..], &[0]].concat(), &extra), key);
        if !tokens.is_empty() {
            let mut changed = tokens.clone();
            changed[place % tokens.len()] ^= 1;
            prop_assert_ne!(chain(parent, &changed, &extra), key);
            // The last token's bytes as the first of the extra ones.
            let (last, head) = tokens.split_last().unwrap();
            prop_assert_ne!(chain(parent, head, &[&last.to_le_bytes()[..], &extra].concat()), key);
        }
    }
}

/// Programs of tomorrow find the blocks in pools of today: these values never change. They were computed by another program from the
/// description of the encoding.
#[test]
fn golden_values_pin_the_format() {
    assert_eq!(llama().namespace().to_string(), "bbd88656dfca65aac68a5a28a93a69e3");
    assert_eq!(NamespaceFields::default().namespace().to_string(), "aa51ca4536f2ee66ff7abd7366878b00");
    let first = chain(None, &(0..16).collect::<Vec<u32>>(), b"");
    assert_eq!(first.to_string(), "2d2d8ea16a5502275edaa9d80fb801e6");
    assert_eq!(chain(Some(first), &(16..116).collect::<Vec<u32>>(), b"image").to_string(), "da32270d5dcfe3157512b2450a4f9e53");
}

#[test]
fn no_parent_is_not_a_parent_of_zeros() {
    assert_ne!(chain(None, &[1], b""), chain(Some(BlockKey([0; 16])), &[1], b""));
}

#[test]
fn text_that_is_no_name_is_refused() {
    for text in ["", "00", "+0000000000000000000000000000000", "0000000000000000000000000000000g", "000000000000000000000000000000000"] {
        assert!(matches!(text.parse::<BlockKey>(), Err(Error::Invalid(_))), "{text}");
    }
}

#[test]
fn the_salt_does_not_show() {
    let shown = format!("{:?}", llama());
    assert!(shown.contains("Salt(6 bytes)") && !shown.contains("116, 101") && !shown.contains("tenant\""), "{shown}");
}
