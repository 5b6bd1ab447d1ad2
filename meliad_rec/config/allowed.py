"""What the configuration of a run may call, from whomever the run is.

A model is made of MODEL, a dataset of DATA; neither runs what it is given.
"""

MODEL = (
  'meliad_rec.activations',
  'meliad_rec.archs',
  'meliad_rec.cores',
  'meliad_rec.embedding',
  'meliad_rec.gates',
  'meliad_rec.halting',
  'meliad_rec.heads',
  'meliad_rec.kernels',
  'meliad_rec.layer_config',
  'meliad_rec.model',
  'meliad_rec.norms',
  'meliad_rec.pooling',
  'meliad_rec.positions',
  'meliad_rec.span',
)
DATA = (
  'meliad_rec.data.generated',
  'meliad_rec.data.store.Store',
  'meliad_rec.data.text.Text',
  'meliad_rec.data.sources.Code',
  'meliad_rec.data.sources.Folder',
  'meliad_rec.data.sources.Jsonl',
  'meliad_rec.data.sources.Pg19',
  'meliad_rec.data.vocabulary',
)
