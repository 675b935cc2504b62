// SPDX-License-Identifier: Apache-2.0

use super::*;
use std::collections::HashSet;

fn config() -> LayoutConfig {
    LayoutConfig::builder().num_blocks(8).num_layers(4).outer_dim(2).page_size(16).inner_dim(32).build().unwrap()
}

fn model() -> Model {
    Model { name: "tiny".into(), dtype: "bfloat16".into(), ..Model::default() }
}

#[test]
fn whatever_shapes_the_bytes_makes_another_namespace() {
    let all =
        |model: &Model, config: &LayoutConfig, order, ranks| namespaces(model, &BlockShape::new(config, order).unwrap(), ranks).unwrap();
    let unknown = KvBlockLayout::Unknown;
    let mut seen = HashSet::new();
    let mut is_new = |namespaces: Vec<Namespace>| namespaces.into_iter().all(|namespace| seen.insert(namespace));
    assert!(is_new(all(&model(), &config(), unknown, Ranks::ALONE)));
    assert!(is_new(all(&model(), &config(), KvBlockLayout::OperationalNHD, Ranks::ALONE)));
    assert!(is_new(all(&model(), &config(), KvBlockLayout::OperationalHND, Ranks::ALONE)));
    assert!(is_new(all(&model(), &config(), unknown, Ranks::new(0, 2).unwrap())), "each rank has one of its own");
    for other in [
        Model { name: "Tiny".into(), ..model() },
        Model { revision: "2".into(), ..model() },
        Model { dtype: "float16".into(), ..model() },
        Model { adapters: vec!["lora".into()], ..model() },
        Model { tenant_salt: vec![1], ..model() },
        Model { extra: [("rope".into(), "long".into())].into(), ..model() },
    ] {
        assert!(is_new(all(&other, &config(), unknown, Ranks::ALONE)), "{other:?}");
    }
    for change in [
        |config: &mut LayoutConfig| config.num_layers = 5,
        |config: &mut LayoutConfig| config.outer_dim = 1,
        |config: &mut LayoutConfig| config.page_size = 32,
        |config: &mut LayoutConfig| config.inner_dim = 64,
        |config: &mut LayoutConfig| config.dtype_width_bytes = 4,
        |config: &mut LayoutConfig| config.num_heads = Some(2),
    ] {
        let mut other = config();
        change(&mut other);
        assert!(is_new(all(&model(), &other, unknown, Ranks::ALONE)), "{other:?}");
        assert!(!BlockShape::new(&config(), unknown).unwrap().is_of(&other, unknown), "{other:?}");
    }
    let more = LayoutConfig { num_blocks: 99, ..config() };
    assert!(!is_new(all(&model(), &more, unknown, Ranks::ALONE)), "how many blocks there are changes none of their bytes");
}

#[test]
fn nonsense_is_refused_by_name() {
    let shape = BlockShape::new(&config(), KvBlockLayout::Unknown).unwrap();
    for (model, field) in [(Model { name: " ".into(), ..model() }, "model name"), (Model { dtype: String::new(), ..model() }, "dtype")] {
        assert!(namespaces(&model, &shape, Ranks::ALONE).unwrap_err().to_string().contains(field));
    }
    assert!(Ranks::new(2, 2).is_err() && Ranks::new(0, 0).is_err());
    let huge = LayoutConfig { inner_dim: usize::MAX / 2, ..config() };
    let empty = LayoutConfig { page_size: 0, ..config() };
    assert!(BlockShape::new(&huge, KvBlockLayout::Unknown).is_err() && BlockShape::new(&empty, KvBlockLayout::Unknown).is_err());
    assert!(BlockShape::new(&config(), KvBlockLayout::UniversalTP).is_err());
}
