"""Pictures as rows of `zoo.batches`: folders of classes, decoding, processors, augmentation."""

from zoo.images.attention_maps import class_attention as class_attention
from zoo.images.attention_maps import draw_attention as draw_attention
from zoo.images.augmentation import colour as colour
from zoo.images.augmentation import crop as crop
from zoo.images.augmentation import flip as flip
from zoo.images.augmentation import mixed_up as mixed_up
from zoo.images.classes import LabelledPictures as LabelledPictures
from zoo.images.classes import read_folder as read_folder
from zoo.images.pictures import Encoded as Encoded
from zoo.images.pictures import Folder as Folder
from zoo.images.pictures import decode as decode
from zoo.images.processor import Processor as Processor
